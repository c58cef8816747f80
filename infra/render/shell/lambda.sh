# By the function's own name, with the caller's rights; README.md has the call of its URL.
call_model() { # MODEL STACK KEYS
  try_bodies "$1" "" invoke "$(output "$2" Function)"
}

invoke() { # FUNCTION PATH PAYLOAD
  local failure
  failure="$(aws lambda invoke --function-name "$1" --qualifier live --cli-binary-format raw-in-base64-out \
    --cli-read-timeout "$TIMEOUT_S" --payload "$3" --query FunctionError --output text answer.json)" || failure="$?"
  if [ -e answer.json ]; then cat answer.json && rm answer.json; fi
  [ "$failure" = None ]
}
