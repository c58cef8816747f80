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
