# teneral pool render fargate pool.toml -o rendered && terraform apply
provider "aws" {
  region = "eu-central-1"
}

module "models" {
  source     = "../../fargate"
  rendered   = "${path.module}/../../../rendered/fargate"
  vpc_id     = "vpc-0123456789abcdef0"
  subnet_ids = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
  secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:teneral-AbCdEf"
}

output "urls" {
  value = module.models.urls
}
