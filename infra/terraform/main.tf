locals {
  roles = { for role, principals in var.principals : role => principals if length(principals) > 0 }
  policies = {
    for role in keys(local.roles) : role => replace(
      replace(file("${path.module}/../policies/${role}.json"), "BUCKET", var.bucket), "PREFIX", "${var.prefix}/*"
    )
  }
}

resource "aws_s3_bucket" "runs" {
  bucket = var.bucket
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    id     = "dcr-s3-abandoned-uploads"
    status = "Enabled"

    filter {
      prefix = "${var.prefix}/"
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
}

resource "aws_iam_role" "role" {
  for_each = local.roles

  name = "dcr-s3-${var.bucket}-${each.key}"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { AWS = each.value }
    }]
  })
}

resource "aws_iam_role_policy" "role" {
  for_each = local.roles

  name   = "dcr-s3"
  role   = aws_iam_role.role[each.key].id
  policy = local.policies[each.key]
}
