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

call_model() { # MODEL STACK KEYS COMPONENT
  local endpoint
  endpoint="$(output "$2" Endpoint)"
  aws sagemaker wait endpoint-in-service --endpoint-name "$endpoint"
  if invoke "$endpoint" "$4" '{"prompt": "Hello", "max_tokens": 16}'; then
    echo "$1: $(cat answer.json)"
  elif invoke "$endpoint" "$4" '{"input": "Hello"}'; then
    echo "$1: a vector"
  else
    echo "$1 does not answer: aws logs tail /aws/sagemaker/Endpoints/$endpoint" >&2
    exit 1
  fi
  rm -f answer.json
}

invoke() { # ENDPOINT COMPONENT BODY
  aws sagemaker-runtime invoke-endpoint --endpoint-name "$1" ${2:+--inference-component-name "$2"} \
    --content-type application/json --cli-binary-format raw-in-base64-out --body "$3" answer.json >/dev/null
}
