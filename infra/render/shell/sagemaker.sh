call_model() { # MODEL STACK KEYS COMPONENT
  local endpoint
  endpoint="$(output "$2" Endpoint)"
  aws sagemaker wait endpoint-in-service --endpoint-name "$endpoint"
  try_bodies "$1" "" invoke "$endpoint" "$4"
}

invoke() { # ENDPOINT COMPONENT PATH BODY
  if ! aws sagemaker-runtime invoke-endpoint --endpoint-name "$1" ${2:+--inference-component-name "$2"} \
    --content-type application/json --cli-binary-format raw-in-base64-out --body "$4" answer.json >/dev/null; then
    echo "aws logs tail /aws/sagemaker/Endpoints/$1"
    return 1
  fi
  if [ -e answer.json ]; then cat answer.json && rm answer.json; fi
}
