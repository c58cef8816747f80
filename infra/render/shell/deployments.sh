INTERCEPTOR_NAMESPACE="${INTERCEPTOR_NAMESPACE:-keda}" # of KEDA's HTTP add-on

ready() {
  each_model model_ready
}

model_ready() { # MODEL RESOURCE API_KEY_VARIABLE WARM
  if [ "$4" -gt 0 ]; then
    in_namespace rollout status "deployment/$2" --timeout "${TIMEOUT_S}s"
  else # a Deployment of no instances, which the first request starts
    in_namespace wait --for condition=Ready "scaledobject/$2" --timeout "${TIMEOUT_S}s"
  fi
}

call_model() { # MODEL RESOURCE API_KEY_VARIABLE WARM
  if [ "$4" -gt 0 ]; then
    ask_service "$NAMESPACE" "$2" 8080 "$1" "$3"
  else # the interceptor finds the model by the host
    ask_service "$INTERCEPTOR_NAMESPACE" keda-add-ons-http-interceptor-proxy 8080 "$1" "$3" "host: $2"
  fi
}
