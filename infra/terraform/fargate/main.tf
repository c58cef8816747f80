# Models on ECS with Fargate: a stack of each template that `teneral pool render fargate` wrote. The pool file stays the one
# place for a model's settings: render again, and apply.
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.0, < 7.0" }
  }
}

variable "rendered" {
  type        = string
  description = "The folder that `teneral pool render fargate` wrote"
}

variable "vpc_id" {
  type        = string
  description = "The network of the services and of their clients"
}

variable "subnet_ids" {
  type        = list(string)
  description = "Private subnets that reach ECR, the store, logs and Secrets Manager"

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "A load balancer needs subnets in two zones at least."
  }
}

variable "clients_cidr" {
  type        = string
  default     = "10.0.0.0/8"
  description = "Addresses that may send requests"
}

variable "secret_arn" {
  type        = string
  default     = null
  description = "A secret of Secrets Manager: a JSON object with the keys that the pool file names"
}

locals {
  suffix    = ".template.yaml"
  templates = { for name in fileset(var.rendered, "*${local.suffix}") : trimsuffix(name, local.suffix) => file("${var.rendered}/${name}") }
  needs_key = { for name, text in local.templates : name => contains(keys(try(yamldecode(text).Parameters, {})), "SecretArn") }
  network   = { Vpc = var.vpc_id, Subnets = join(",", var.subnet_ids), Clients = var.clients_cidr }
}

resource "aws_cloudformation_stack" "model" {
  for_each      = local.templates
  name          = each.key
  template_body = each.value
  capabilities  = ["CAPABILITY_IAM"]
  parameters    = local.needs_key[each.key] ? merge(local.network, { SecretArn = var.secret_arn }) : local.network

  lifecycle {
    precondition {
      condition     = !local.needs_key[each.key] || var.secret_arn != null
      error_message = "${each.key} has secret settings: set secret_arn."
    }
  }
}

output "urls" {
  description = "Addresses by model, inside of the VPC"
  value       = { for name, stack in aws_cloudformation_stack.model : name => stack.outputs["Url"] }
}
