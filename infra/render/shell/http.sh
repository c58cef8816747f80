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
