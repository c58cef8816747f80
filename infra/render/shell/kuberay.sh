check() {
  check_cluster
}

apply() {
  each_file apply_file
}

ready() {
  in_namespace wait --for condition=Ready rayservice/teneral --timeout "${TIMEOUT_S}s"
}

call() {
  each_model call_model
}

call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  ask_service "$NAMESPACE" teneral-serve-svc 8000 "$1" "$3"
}

remove() {
  each_file remove_file
}
