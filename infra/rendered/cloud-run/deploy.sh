#!/usr/bin/env bash
# Rendered by `teneral pool render cloud-run` from reference.pool.toml: change that file, not this one.
# Deploys chat and embed on Cloud Run:
#
#   ./deploy.sh          check, apply, ready and call, one after the other
#   ./deploy.sh check    name what must exist before and does not; changes nothing
#   ./deploy.sh apply    apply the documents next to this script
#   ./deploy.sh ready    wait until instances are ready
#   ./deploy.sh call     send one request to each model
#   ./deploy.sh remove   remove what `apply` made
set -euo pipefail

PROJECT="${PROJECT:-my-project}"

each_file() { # calls its arguments with FILE
  "$@" chat.service.yaml
  "$@" embed.service.yaml
}

each_event() { # calls its arguments with MODEL EXAMPLE_EVENT
  :
}

each_api_key() { # calls its arguments with MODEL VARIABLE
  "$@" chat CHAT_API_KEY
}

each_account() { # calls its arguments with EMAIL
  "$@" chat-6db39790@my-project.iam.gserviceaccount.com
  "$@" embed-71b343e0@my-project.iam.gserviceaccount.com
}

each_secret() { # calls its arguments with SECRET
  "$@" chat-api-key
}

each_image() { # calls its arguments with IMAGE
  "$@" 123456789012.dkr.ecr.eu-central-1.amazonaws.com/teneral@sha256:4c7d1f0a9be2834d5f60718293a4b5c6d7e8f9000112233445566778899aabbc
}

each_model() { # calls its arguments with MODEL RESOURCE API_KEY_VARIABLE
  "$@" chat chat CHAT_API_KEY
  "$@" embed embed ''
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

check_api_key() { # MODEL VARIABLE
  [ -n "${!2:-}" ] || missing "the variable $2: the API key of $1, for the call" "export $2"
}

# An API key reaches curl through a pipe: other users of this machine can see arguments.
ask() { # URL MODEL API_KEY_VARIABLE [HEADER...]
  local url="$1" model="$2" key_variable="$3"
  shift 3
  if [ -n "$key_variable" ]; then
    check_api_key "$model" "$key_variable"
    stop_if_incomplete
    set -- "authorization: Bearer ${!key_variable}" "$@"
  fi
  headers=("$@")
  try_bodies "$model" '"model": "'"$model"'", ' post "$url"
}

# Repeats a request while nothing listens there, or it answers that it is not ready.
post() { # URL PATH BODY
  printf '%s\n' "content-type: application/json" ${headers[@]+"${headers[@]}"} |
    curl --silent --show-error --fail-with-body --retry 20 --retry-delay 1 --retry-connrefused \
      --connect-timeout 10 --max-time "$TIMEOUT_S" ${INGRESS:+--connect-to "::$INGRESS"} -H @- -d "$3" "$1$2"
}

REGION="${REGION:-}"
PROJECT="${PROJECT:-}"

check() {
  need gcloud
  need curl
  [ -n "$REGION" ] || missing "the variable REGION" "REGION=europe-west3 $0"
  [ -n "$PROJECT" ] || missing "the variable PROJECT" "PROJECT=my-project $0"
  stop_if_incomplete
  if [ -z "$(gcloud auth list --filter status:ACTIVE --format 'value(account)')" ]; then
    missing "a login" "gcloud auth login"
    stop_if_incomplete
  fi
  if [ -z "$(in_project services list --enabled --filter config.name=run.googleapis.com --format 'value(config.name)')" ]; then
    missing "the API of Cloud Run" "gcloud services enable run.googleapis.com --project $PROJECT"
  fi
  each_account check_account
  each_secret check_secret
  each_image check_image
  each_api_key check_api_key
  stop_if_incomplete
}

in_project() {
  gcloud --project "$PROJECT" "$@"
}

check_account() { # EMAIL
  in_project iam service-accounts describe "$1" >/dev/null 2>&1 ||
    missing "the account $1" "gcloud iam service-accounts create ${1%%@*} --project $PROJECT"
}

check_secret() { # SECRET
  in_project secrets describe "$1" >/dev/null 2>&1 ||
    missing "the secret $1" "gcloud secrets create $1 --data-file FILE --project $PROJECT"
}

check_image() { # IMAGE
  case "$1" in
    *.pkg.dev/*)
      in_project artifacts docker images describe "$1" >/dev/null 2>&1 || missing "the image $1" "docker push $1"
      ;;
  esac
}

# Each document is a revision; the command ends when it is ready.
apply() {
  each_file replace_service
}

replace_service() { # FILE
  in_project run services replace "$1" --region "$REGION"
}

ready() {
  each_model model_ready
}

model_ready() { # MODEL RESOURCE API_KEY_VARIABLE
  local status
  status="$(in_project run services describe "$2" --region "$REGION" --format 'value(status.conditions[0].status)')"
  if [ "$status" != True ]; then
    echo "the service $2 is not ready: gcloud run services describe $2 --region $REGION --project $PROJECT" >&2
    exit 1
  fi
}

# With an identity of the caller's: a service answers no others until it is made public.
call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  local url token
  url="$(in_project run services describe "$2" --region "$REGION" --format 'value(status.url)')"
  token="$(gcloud auth print-identity-token)"
  ask "$url" "$1" "$3" "x-serverless-authorization: Bearer $token"
}

remove() {
  each_model remove_model
}

remove_model() { # MODEL RESOURCE API_KEY_VARIABLE
  if in_project run services describe "$2" --region "$REGION" >/dev/null 2>&1; then
    in_project run services delete "$2" --region "$REGION" --quiet
  fi
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
