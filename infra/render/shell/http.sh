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
