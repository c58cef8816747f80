#!/usr/bin/env bash
# Rendered by `teneral pool render helm` from reference.pool.toml: change that file, not this one.
# Deploys chat and embed on Kubernetes with Helm:
#
#   ./deploy.sh          check, apply, ready and call, one after the other
#   ./deploy.sh check    name what must exist before and does not; changes nothing
#   ./deploy.sh apply    apply the documents next to this script
#   ./deploy.sh ready    wait until instances are ready
#   ./deploy.sh call     send one request to each model
#   ./deploy.sh remove   remove what `apply` made
set -euo pipefail

each_file() { # calls its arguments with FILE
  "$@" values.yaml
}

each_event() { # calls its arguments with MODEL EXAMPLE_EVENT
  :
}

each_api_key() { # calls its arguments with MODEL VARIABLE
  "$@" chat CHAT_API_KEY
}

each_custom_resource() { # calls its arguments with NAME WHAT_BRINGS_IT
  "$@" scaledobjects.keda.sh KEDA
}

each_secret() { # calls its arguments with SECRET KEY...
  "$@" chat-secrets CHAT_API_KEY
}

each_model() { # calls its arguments with MODEL RESOURCE API_KEY_VARIABLE WARM
  "$@" chat chat CHAT_API_KEY 1
  "$@" embed embed '' 1
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

NAMESPACE="${NAMESPACE:-models}"
LOCAL_PORT="${LOCAL_PORT:-8080}" # of this machine, for the calls

check_cluster() {
  need kubectl
  need curl
  stop_if_incomplete
  if ! kubectl version >/dev/null; then
    missing "a cluster that kubectl reaches" "kubectl config use-context NAME"
    stop_if_incomplete
  fi
  each_custom_resource check_custom_resource
  kubectl get namespace "$NAMESPACE" >/dev/null 2>&1 ||
    missing "the namespace $NAMESPACE" "kubectl create namespace $NAMESPACE"
  each_secret check_secret
  each_api_key check_api_key
  stop_if_incomplete
}

check_custom_resource() { # NAME WHAT_BRINGS_IT
  kubectl get customresourcedefinition "$1" >/dev/null 2>&1 ||
    missing "$1" "install $2, or choose the cluster that has it: kubectl config use-context NAME"
}

# Asks for the names of the keys only.
check_secret() { # SECRET KEY...
  local secret="$1" key files=""
  shift
  for key in "$@"; do files="$files --from-file $key=FILE"; done
  for key in "$@"; do
    if [ "$(in_namespace get secret "$secret" -o go-template="{{if index .data \"$key\"}}yes{{end}}" 2>/dev/null)" != yes ]; then
      missing "the key $key of the secret $secret" "kubectl create secret generic $secret --namespace $NAMESPACE$files"
      return
    fi
  done
}

in_namespace() {
  kubectl --namespace "$NAMESPACE" "$@"
}

apply_file() { # FILE
  in_namespace apply -f "$1"
}

remove_file() { # FILE
  in_namespace delete --ignore-not-found -f "$1"
}

# Asks a model through a port of this machine.
ask_service() { # NAMESPACE SERVICE PORT MODEL API_KEY_VARIABLE [HEADER...]
  local forwarding
  kubectl port-forward --namespace "$1" "service/$2" "$LOCAL_PORT:$3" >/dev/null &
  forwarding=$!
  # shellcheck disable=SC2064 # of this forwarding
  trap "kill $forwarding 2>/dev/null || true" EXIT
  shift 3
  ask "http://localhost:$LOCAL_PORT" "$@"
  kill "$forwarding" 2>/dev/null || true
  trap - EXIT
}

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

RELEASE="${RELEASE:-models}"
CHART="${CHART:-infra/helm/teneral}" # of Teneral's sources, or oci://REGISTRY/charts/teneral

check() {
  need helm
  check_cluster
  if ! helm show chart "$CHART" >/dev/null; then
    missing "the chart $CHART" "set CHART to the folder infra/helm/teneral of Teneral's sources, or to a registry's oci://…"
    stop_if_incomplete
  fi
}

apply() {
  each_file apply_values
}

apply_values() { # FILE
  helm upgrade "$RELEASE" "$CHART" --install --namespace "$NAMESPACE" --values "$1"
}

remove() {
  helm uninstall "$RELEASE" --namespace "$NAMESPACE" --ignore-not-found
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
