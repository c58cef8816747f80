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
