# teneral pool render cloud-run pool.toml -o rendered --project my-project && terraform apply
provider "google" {
  project = "my-project"
}

module "models" {
  source   = "../../cloud-run"
  rendered = "${path.module}/../../../rendered/cloud-run"
  project  = "my-project"
  region   = "europe-west3"
  buckets  = ["my-project-models"]
}

output "urls" {
  value = module.models.urls
}
