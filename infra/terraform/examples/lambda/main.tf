# teneral pool render lambda pool.toml -o rendered && terraform apply
provider "aws" {
  region = "eu-central-1"
}

module "models" {
  source     = "../../lambda"
  rendered   = "${path.module}/../../../rendered/lambda"
  secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:teneral-AbCdEf"
}

output "urls" {
  value = module.models.urls
}
