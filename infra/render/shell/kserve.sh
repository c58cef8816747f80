check() {
  check_cluster
}

# Documents of one model are its versions: the next one is a canary of one that is ready.
apply() {
  each_file apply_in_turn
}

apply_in_turn() { # FILE
  apply_file "$1"
  case "$1" in
    *inference-service*) in_namespace wait --for condition=Ready "inferenceservice/${1%%.*}" --timeout "${TIMEOUT_S}s" ;;
  esac
}

remove() {
  each_file remove_file
}
