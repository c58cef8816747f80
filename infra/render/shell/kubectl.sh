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
