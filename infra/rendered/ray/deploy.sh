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

check_api_key() { # MODEL VARIABLE
  [ -n "${!2:-}" ] || missing "the variable $2: the API key of $1, for the call" "export $2"
}

# Prints an answer of the model: text, or of an encoder, which has none, a vector. An API key reaches curl through a
# pipe: other users of this machine can see arguments.
ask() { # URL MODEL API_KEY_VARIABLE [HEADER...]
  local url="$1" model="$2" key_variable="$3" answer
  shift 3
  if [ -n "$key_variable" ]; then
    check_api_key "$model" "$key_variable"
    stop_if_incomplete
    set -- "authorization: Bearer ${!key_variable}" "$@"
  fi
  if answer="$(post "$url/v1/completions" '{"model": "'"$model"'", "prompt": "Hello", "max_tokens": 16}' "$@")"; then
    echo "$model: $answer"
  elif post "$url/v1/embeddings" '{"model": "'"$model"'", "input": "Hello"}' "$@" >/dev/null; then
    echo "$model: a vector"
  else
    echo "$model does not answer at $url: $answer" >&2
    exit 1
  fi
}

# Repeats a request while nothing listens there, or it answers that it is not ready.
post() { # URL BODY [HEADER...]
  local url="$1" body="$2"
  shift 2
  printf '%s\n' "content-type: application/json" "$@" |
    curl --silent --show-error --fail-with-body --retry 20 --retry-delay 1 --retry-connrefused \
      --connect-timeout 10 --max-time "$TIMEOUT_S" ${INGRESS:+--connect-to "::$INGRESS"} -H @- -d "$body" "$url"
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

call() {
  each_model call_model
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
