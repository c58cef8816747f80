#!/usr/bin/env bash
# Rendered by `teneral pool render ray` from reference.pool.toml: change that file, not this one.
# Deploys chat and embed on Ray Serve:
#
#   ./deploy.sh          check, apply, ready and call, one after the other
#   ./deploy.sh check    name what must exist before and does not; changes nothing
#   ./deploy.sh apply    apply the documents next to this script
#   ./deploy.sh ready    wait until instances are ready
#   ./deploy.sh call     send one request to each model
#   ./deploy.sh remove   remove what `apply` made
set -euo pipefail

each_file() { # calls its arguments with FILE
  "$@" serve.yaml
}

each_event() { # calls its arguments with MODEL EXAMPLE_EVENT
  :
}

each_api_key() { # calls its arguments with MODEL VARIABLE
  "$@" chat CHAT_API_KEY
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

ADDRESS="${ADDRESS:-http://localhost:8265}" # of the cluster's dashboard
URL="${URL:-http://localhost:8000}"         # of any node's proxy
POLL_S="${POLL_S:-5}"

check() {
  need serve
  need curl
  stop_if_incomplete
  each_api_key check_api_key
  if ! serve status --address "$ADDRESS" >/dev/null; then
    missing "a Ray cluster at $ADDRESS" "ray start --head, or set ADDRESS"
  fi
  stop_if_incomplete
}

apply() {
  each_file deploy_file
}

deploy_file() { # FILE
  serve deploy "$1" --address "$ADDRESS"
}

ready() {
  local status waited_s=0
  while true; do
    status="$(serve status --address "$ADDRESS")"
    case "$status" in
      *DEPLOY_FAILED* | *UNHEALTHY*)
        echo "$status" >&2
        exit 1
        ;;
      *DEPLOYING* | *NOT_STARTED*) ;;
      *RUNNING*) return ;;
    esac
    if [ "$waited_s" -ge "$TIMEOUT_S" ]; then
      echo "not all applications are running after $TIMEOUT_S s: $status" >&2
      exit 1
    fi
    sleep "$POLL_S"
    waited_s=$((waited_s + POLL_S))
  done
}

call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  ask "$URL" "$1" "$3"
}

remove() {
  serve shutdown --address "$ADDRESS" --yes
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
