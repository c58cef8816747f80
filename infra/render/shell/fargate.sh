VPC="${VPC:-}"
SUBNETS="${SUBNETS:-}"           # private ones, in two zones at least, with commas between them
CLIENTS="${CLIENTS:-10.0.0.0/8}" # addresses that may send requests

check() {
  [ -n "$VPC" ] || missing "the variable VPC" "VPC=vpc-… $0"
  [ -n "$SUBNETS" ] || missing "the variable SUBNETS" "SUBNETS=subnet-…,subnet-… $0"
  need curl
  check_account
  each_api_key check_api_key
  stop_if_incomplete
}

apply() {
  each_model deploy_model
}

deploy_model() { # MODEL STACK KEYS
  deploy_stack "$2" "$3" "Vpc=$VPC" "Subnets=$SUBNETS" "Clients=$CLIENTS"
}

# From inside the VPC: the balancer has no address outside.
call_model() { # MODEL STACK KEYS API_KEY_VARIABLE
  ask "$(output "$2" Url)" "$1" "$4"
}
