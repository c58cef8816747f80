# Models on AWS Lambda: a stack of each template that `teneral pool render lambda` wrote. The pool file stays the one place
# for a model's settings: render again, and apply.
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.0, < 7.0" }
  }
}

variable "rendered" {
  type        = string
  description = "The folder that `teneral pool render lambda` wrote"
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
}

resource "aws_cloudformation_stack" "model" {
  for_each      = local.templates
  name          = each.key
  template_body = each.value
  capabilities  = ["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"] # a role, and SAM's transform
  parameters    = local.needs_key[each.key] ? { SecretArn = var.secret_arn } : {}

  lifecycle {
    precondition {
      condition     = !local.needs_key[each.key] || var.secret_arn != null
      error_message = "${each.key} has secret settings: set secret_arn."
    }
  }
}

output "functions" {
  description = "Names of the functions by model, for callers' rights to invoke them"
  value       = { for name, stack in aws_cloudformation_stack.model : name => stack.outputs["Function"] }
}

output "urls" {
  description = "Addresses by model; requests are signed by SigV4 (teneral.client)"
  value       = { for name, stack in aws_cloudformation_stack.model : name => stack.outputs["Url"] }
}
