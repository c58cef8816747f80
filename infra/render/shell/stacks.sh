check() {
  check_account
  stop_if_incomplete
}

apply() {
  each_model deploy_model
}

deploy_model() { # MODEL STACK KEYS
  deploy_stack "$2" "$3"
}
