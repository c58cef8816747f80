INGRESS="${INGRESS:-}" # HOST:PORT of Knative's ingress, where this machine does not know the names of services

ready() {
  each_model model_ready
}

model_ready() { # MODEL RESOURCE API_KEY_VARIABLE
  in_namespace wait --for condition=Ready "$2" --timeout "${TIMEOUT_S}s"
}

call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  local url
  url="$(in_namespace get "$2" -o 'jsonpath={.status.url}')"
  ask "$url" "$1" "$3"
}
