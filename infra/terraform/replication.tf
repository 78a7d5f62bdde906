# A second copy of the objects for disaster recovery. Versioning is needed for replication only; runs never overwrite
# what matters, so old versions of acknowledgements may go soon.
resource "aws_s3_bucket_versioning" "runs" {
  count  = var.replica_bucket_arn == "" ? 0 : 1
  bucket = aws_s3_bucket.runs.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_iam_role" "replication" {
  count = var.replica_bucket_arn == "" ? 0 : 1
  name  = "dcr-s3-${var.bucket}-replication"
  tags  = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "s3.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "replication" {
  count = var.replica_bucket_arn == "" ? 0 : 1
  name  = "dcr-s3"
  role  = aws_iam_role.replication[0].id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = ["s3:GetReplicationConfiguration", "s3:ListBucket"]
        Resource = [aws_s3_bucket.runs.arn]
      },
      {
        Effect   = "Allow"
        Action   = ["s3:GetObjectVersionForReplication", "s3:GetObjectVersionAcl", "s3:GetObjectVersionTagging"]
        Resource = ["${aws_s3_bucket.runs.arn}/*"]
      },
      {
        Effect   = "Allow"
        Action   = ["s3:ReplicateObject", "s3:ReplicateTags"]
        Resource = ["${var.replica_bucket_arn}/*"]
      },
    ]
  })
}

resource "aws_s3_bucket_replication_configuration" "runs" {
  count  = var.replica_bucket_arn == "" ? 0 : 1
  bucket = aws_s3_bucket.runs.id
  role   = aws_iam_role.replication[0].arn

  rule {
    id     = "dcr-s3"
    status = "Enabled"

    filter {
      prefix = "${var.prefix}/"
    }

    delete_marker_replication {
      status = "Disabled"
    }

    destination {
      bucket        = var.replica_bucket_arn
      storage_class = "STANDARD_IA"
    }
  }

  depends_on = [aws_s3_bucket_versioning.runs]
}
