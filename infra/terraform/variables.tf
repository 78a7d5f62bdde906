variable "bucket" {
  description = "Name of the bucket for runs."
  type        = string
}

variable "prefix" {
  description = "The roles may use the runs at PREFIX/anything; without slashes at its ends."
  type        = string
  default     = "runs"
}

variable "principals" {
  description = "Who may take each role: ARNs of users, roles or OIDC-backed roles, by role."
  type        = map(list(string))
  default = {
    sender   = []
    receiver = []
    janitor  = []
    operator = []
  }
}

variable "replica_bucket_arn" {
  description = "A versioned bucket in another region to replicate to; empty for none. A relay is the better way to serve receivers there: replication is asynchronous and does not keep a manifest behind its segments."
  type        = string
  default     = ""
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}
