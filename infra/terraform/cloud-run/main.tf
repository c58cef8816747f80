# Models on Cloud Run: a service, and an account with the least rights, of each document that
# `teneral pool render cloud-run --project ID` wrote. The pool file stays the one place for a model's settings: render again,
# and apply. Models of several versions have a document a version, which `deploy.sh` applies in turn: not this module.
terraform {
  required_version = ">= 1.5"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.0, < 8.0" }
  }
}

variable "rendered" {
  type        = string
  description = "The folder that `teneral pool render cloud-run` wrote"
}

variable "project" {
  type        = string
  description = "The project's id, as given to `render`"
}

variable "region" {
  type        = string
  description = "The region of the services"
}

variable "buckets" {
  type        = set(string)
  default     = []
  description = "Buckets of Cloud Storage that the models are read from"
}

locals {
  suffix   = ".service.yaml"
  services = { for name in fileset(var.rendered, "*${local.suffix}") : trimsuffix(name, local.suffix) => yamldecode(file("${var.rendered}/${name}")) }
  specs    = { for name, service in local.services : name => service.spec.template.spec }
  plain    = { for name, spec in local.specs : name => { for each in spec.containers[0].env : each.name => each.value if can(each.value) } }
  secrets  = { for name, spec in local.specs : name => { for each in spec.containers[0].env : each.name => each.valueFrom.secretKeyRef.name if can(each.valueFrom) } }
  readers  = { for pair in setproduct(keys(local.services), var.buckets) : "${pair[0]} ${pair[1]}" => { model = pair[0], bucket = pair[1] } }
  keyed    = merge([for name, secrets in local.secrets : { for secret in toset(values(secrets)) : "${name} ${secret}" => { model = name, secret = secret } }]...)
}

resource "google_service_account" "model" {
  for_each     = local.specs
  project      = var.project
  account_id   = split("@", each.value.serviceAccountName)[0]
  display_name = "Teneral: ${each.key}"
}

resource "google_storage_bucket_iam_member" "reads" {
  for_each = local.readers
  bucket   = each.value.bucket
  role     = "roles/storage.objectViewer"
  member   = google_service_account.model[each.value.model].member
}

resource "google_secret_manager_secret_iam_member" "reads" {
  for_each  = local.keyed
  project   = var.project
  secret_id = each.value.secret
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.model[each.value.model].member
}

resource "google_cloud_run_service" "model" {
  for_each = local.services
  project  = var.project
  location = var.region
  name     = each.value.metadata.name

  metadata {
    annotations = each.value.metadata.annotations
    labels      = each.value.metadata.labels
  }

  template {
    metadata {
      annotations = each.value.spec.template.metadata.annotations
    }
    spec {
      container_concurrency = local.specs[each.key].containerConcurrency
      timeout_seconds       = local.specs[each.key].timeoutSeconds
      service_account_name  = google_service_account.model[each.key].email
      node_selector         = try(local.specs[each.key].nodeSelector, null)

      containers {
        image = local.specs[each.key].containers[0].image
        args  = local.specs[each.key].containers[0].args

        dynamic "env" {
          for_each = local.plain[each.key]
          content {
            name  = env.key
            value = env.value
          }
        }
        dynamic "env" {
          for_each = local.secrets[each.key]
          content {
            name = env.key
            value_from {
              secret_key_ref {
                name = env.value
                key  = "latest"
              }
            }
          }
        }
        ports {
          name           = "http1"
          container_port = local.specs[each.key].containers[0].ports[0].containerPort
        }
        resources {
          limits = local.specs[each.key].containers[0].resources.limits
        }
        startup_probe {
          period_seconds    = local.specs[each.key].containers[0].startupProbe.periodSeconds
          timeout_seconds   = local.specs[each.key].containers[0].startupProbe.timeoutSeconds
          failure_threshold = local.specs[each.key].containers[0].startupProbe.failureThreshold
          http_get {
            path = local.specs[each.key].containers[0].startupProbe.httpGet.path
            port = local.specs[each.key].containers[0].startupProbe.httpGet.port
          }
        }
        liveness_probe {
          period_seconds    = local.specs[each.key].containers[0].livenessProbe.periodSeconds
          timeout_seconds   = local.specs[each.key].containers[0].livenessProbe.timeoutSeconds
          failure_threshold = local.specs[each.key].containers[0].livenessProbe.failureThreshold
          http_get {
            path = local.specs[each.key].containers[0].livenessProbe.httpGet.path
            port = local.specs[each.key].containers[0].livenessProbe.httpGet.port
          }
        }
      }
    }
  }

  traffic {
    percent         = 100
    latest_revision = true
  }

  lifecycle {
    precondition {
      condition     = endswith(local.specs[each.key].serviceAccountName, "@${var.project}.iam.gserviceaccount.com")
      error_message = "${each.key} was rendered for another project: teneral pool render cloud-run --project ${var.project}."
    }
  }

  depends_on = [google_storage_bucket_iam_member.reads, google_secret_manager_secret_iam_member.reads]
}

output "urls" {
  description = "Addresses by model; callers need roles/run.invoker"
  value       = { for name, service in google_cloud_run_service.model : name => service.status[0].url }
}
