ready() {
  in_namespace wait --for condition=Ready rayservice/teneral --timeout "${TIMEOUT_S}s"
}

call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  ask_service "$NAMESPACE" teneral-serve-svc 8000 "$1" "$3"
}
