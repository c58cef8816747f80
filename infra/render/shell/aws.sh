SECRET_ARN="${SECRET_ARN:-}" # of the secret with all keys below, as one JSON object; not needed where there are none

check_account() {
  need aws
  stop_if_incomplete
  if ! aws sts get-caller-identity >/dev/null; then
    missing "a login at AWS" "aws login, aws sso login or aws configure"
    stop_if_incomplete
  fi
  each_image check_image
  each_model check_secret
}

check_image() { # ACCOUNT REGION REPOSITORY IMAGE_ID
  aws ecr describe-images --registry-id "$1" --region "$2" --repository-name "$3" --image-ids "$4" >/dev/null 2>&1 ||
    missing "the image $3 ($4) in ECR, account $1, $2" \
      "aws ecr get-login-password --region $2 | docker login --username AWS --password-stdin $1.dkr.ecr.$2.amazonaws.com, and docker push"
}

# Asks for the secret's description, never for its values.
check_secret() { # MODEL STACK KEYS
  if [ -z "$3" ]; then return; fi
  if [ -z "$SECRET_ARN" ]; then
    missing "the variable SECRET_ARN: a secret with the keys $3" \
      "aws secretsmanager create-secret --name teneral --secret-string file://keys.json, and SECRET_ARN=arn:… $0"
  elif ! aws secretsmanager describe-secret --secret-id "$SECRET_ARN" >/dev/null 2>&1; then
    missing "the secret $SECRET_ARN" "aws secretsmanager create-secret --name teneral --secret-string file://keys.json"
  fi
}

# Ends when all of the stack's resources are ready, or, after a failure, as they were before.
deploy_stack() { # STACK KEYS [PARAMETER...]
  local stack="$1" keys="$2"
  shift 2
  if [ -n "$keys" ]; then set -- "SecretArn=$SECRET_ARN" "$@"; fi
  if [ $# -gt 0 ]; then set -- --parameter-overrides "$@"; fi
  aws cloudformation deploy --template-file "$stack.template.yaml" --stack-name "$stack" \
    --capabilities CAPABILITY_IAM --no-fail-on-empty-changeset "$@"
}

ready() {
  each_model stack_ready
}

stack_ready() { # MODEL STACK KEYS
  local status
  status="$(aws cloudformation describe-stacks --stack-name "$2" --query 'Stacks[0].StackStatus' --output text)"
  case "$status" in
    CREATE_COMPLETE | UPDATE_COMPLETE) ;;
    *)
      echo "the stack $2 is $status: aws cloudformation describe-stack-events --stack-name $2" >&2
      exit 1
      ;;
  esac
}

output() { # STACK NAME
  aws cloudformation describe-stacks --stack-name "$1" --query "Stacks[0].Outputs[?OutputKey=='$2'].OutputValue" --output text
}

remove() {
  each_model remove_stack
}

remove_stack() { # MODEL STACK KEYS
  aws cloudformation delete-stack --stack-name "$2"
  aws cloudformation wait stack-delete-complete --stack-name "$2"
}
