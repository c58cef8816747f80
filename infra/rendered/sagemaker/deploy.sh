#!/usr/bin/env bash
# Rendered by `teneral pool render sagemaker` from reference.pool.toml: change that file, not this one.
# Deploys chat and embed on SageMaker:
#
#   ./deploy.sh          check, apply, ready and call, one after the other
#   ./deploy.sh check    name what must exist before and does not; changes nothing
#   ./deploy.sh apply    apply the documents next to this script
#   ./deploy.sh ready    wait until instances are ready
#   ./deploy.sh call     send one request to each model
#   ./deploy.sh remove   remove what `apply` made
set -euo pipefail

each_file() { # calls its arguments with FILE
  "$@" chat.template.yaml
  "$@" embed.template.yaml
}

each_event() { # calls its arguments with MODEL EXAMPLE_EVENT
  :
}

each_image() { # calls its arguments with ACCOUNT REGION REPOSITORY IMAGE_ID
  "$@" 123456789012 eu-central-1 teneral imageDigest=sha256:4c7d1f0a9be2834d5f60718293a4b5c6d7e8f9000112233445566778899aabbc
}

each_model() { # calls its arguments with MODEL STACK KEYS COMPONENT
  "$@" chat chat CHAT_API_KEY chat
  "$@" embed embed '' embed
}

TIMEOUT_S="${TIMEOUT_S:-600}" # longest wait for instances, and for each answer

cd "$(dirname "$0")"
incomplete=""

# Names what must exist and does not, and how to make it.
missing() { # WHAT REMEDY
  echo "missing: $1" >&2
  echo "  $2" >&2
  incomplete=1
}

need() { # PROGRAM
  command -v "$1" >/dev/null || missing "the program $1" "install it, and put it on the PATH"
}

stop_if_incomplete() {
  if [ -n "$incomplete" ]; then exit 1; fi
}

call() {
  each_model call_model
}

# Prints an answer: to the model's example event, else to a prompt, or of an encoder, which takes none, a vector. The
# command gets a path of the server and a body, and prints the answer.
try_bodies() { # MODEL FIELDS COMMAND...
  local model="$1" fields="$2" event answer
  shift 2
  event="$(each_event print_event "$model")"
  if [ -n "$event" ]; then
    if answer="$("$@" /invoke "$event")"; then
      echo "$model: $answer"
      return
    fi
  elif answer="$("$@" /v1/completions "{$fields\"prompt\": \"Hello\", \"max_tokens\": 16}")"; then
    echo "$model: $answer"
    return
  elif "$@" /v1/embeddings "{$fields\"input\": \"Hello\"}" >/dev/null; then
    echo "$model: a vector"
    return
  fi
  echo "$model does not answer: $answer" >&2
  exit 1
}

print_event() { # MODEL OTHER_MODEL EXAMPLE_EVENT
  if [ "$1" = "$2" ]; then printf '%s' "$3"; fi
}

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

check() {
  check_account
  stop_if_incomplete
}

apply() {
  each_model deploy_model
}

deploy_model() { # MODEL STACK KEYS
  deploy_stack "$2" "$3"
}

call_model() { # MODEL STACK KEYS COMPONENT
  local endpoint
  endpoint="$(output "$2" Endpoint)"
  aws sagemaker wait endpoint-in-service --endpoint-name "$endpoint"
  try_bodies "$1" "" invoke "$endpoint" "$4"
}

invoke() { # ENDPOINT COMPONENT PATH BODY
  if ! aws sagemaker-runtime invoke-endpoint --endpoint-name "$1" ${2:+--inference-component-name "$2"} \
    --content-type application/json --cli-binary-format raw-in-base64-out --body "$4" answer.json >/dev/null; then
    echo "aws logs tail /aws/sagemaker/Endpoints/$1"
    return 1
  fi
  if [ -e answer.json ]; then cat answer.json && rm answer.json; fi
}

case "${1:-deploy}" in
  deploy)
    check
    apply
    ready
    call
    ;;
  check | apply | ready | call | remove) "$1" ;;
  *)
    echo "unknown step '$1': name check, apply, ready, call or remove, or none for the first four" >&2
    exit 2
    ;;
esac
