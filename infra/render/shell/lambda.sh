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

# By the function's own name, with the caller's rights; README.md has the call of its URL.
call_model() { # MODEL STACK KEYS
  local function
  function="$(output "$2" Function)"
  if invoke "$function" '{"prompt": "Hello", "max_tokens": 16}'; then
    echo "$1: $(cat answer.json)"
  elif invoke "$function" '{"input": "Hello"}'; then
    echo "$1: a vector"
  else
    echo "$1 does not answer: $(cat answer.json)" >&2
    exit 1
  fi
  rm -f answer.json
}

invoke() { # FUNCTION PAYLOAD
  local failure
  failure="$(aws lambda invoke --function-name "$1" --qualifier live --cli-binary-format raw-in-base64-out \
    --cli-read-timeout "$TIMEOUT_S" --payload "$2" --query FunctionError --output text answer.json)" && [ "$failure" = None ]
}
