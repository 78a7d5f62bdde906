output "role_arns" {
  description = "ARN of each role that has principals."
  value       = { for role, made in aws_iam_role.role : role => made.arn }
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.runs.arn
}
