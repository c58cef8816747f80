INTERCEPTOR_NAMESPACE="${INTERCEPTOR_NAMESPACE:-keda}" # of KEDA's HTTP add-on

ready() {
  each_version version_ready
}

version_ready() { # NAME MODEL API_KEY_VARIABLE WARM
  if [ "$4" -gt 0 ]; then
    in_namespace rollout status "deployment/$1" --timeout "${TIMEOUT_S}s"
  else # a Deployment of no instances, which the first request starts
    in_namespace wait --for condition=Ready "scaledobject/$1" --timeout "${TIMEOUT_S}s"
  fi
}

call() {
  each_version call_version
}

call_version() { # NAME MODEL API_KEY_VARIABLE WARM
  if [ "$4" -gt 0 ]; then
    ask_service "$NAMESPACE" "$1" 8080 "$2" "$3"
  else # the interceptor finds the model by the host
    ask_service "$INTERCEPTOR_NAMESPACE" keda-add-ons-http-interceptor-proxy 8080 "$2" "$3" "host: $1"
  fi
}
