REGION="${REGION:-}"
PROJECT="${PROJECT:-}"

check() {
  need gcloud
  need curl
  [ -n "$REGION" ] || missing "the variable REGION" "REGION=europe-west3 $0"
  [ -n "$PROJECT" ] || missing "the variable PROJECT" "PROJECT=my-project $0"
  stop_if_incomplete
  if [ -z "$(gcloud auth list --filter status:ACTIVE --format 'value(account)')" ]; then
    missing "a login" "gcloud auth login"
    stop_if_incomplete
  fi
  if [ -z "$(in_project services list --enabled --filter config.name=run.googleapis.com --format 'value(config.name)')" ]; then
    missing "the API of Cloud Run" "gcloud services enable run.googleapis.com --project $PROJECT"
  fi
  each_account check_account
  each_secret check_secret
  each_image check_image
  each_api_key check_api_key
  stop_if_incomplete
}

in_project() {
  gcloud --project "$PROJECT" "$@"
}

check_account() { # EMAIL
  in_project iam service-accounts describe "$1" >/dev/null 2>&1 ||
    missing "the account $1" "gcloud iam service-accounts create ${1%%@*} --project $PROJECT"
}

check_secret() { # SECRET
  in_project secrets describe "$1" >/dev/null 2>&1 ||
    missing "the secret $1" "gcloud secrets create $1 --data-file FILE --project $PROJECT"
}

check_image() { # IMAGE
  case "$1" in
    *.pkg.dev/*)
      in_project artifacts docker images describe "$1" >/dev/null 2>&1 || missing "the image $1" "docker push $1"
      ;;
  esac
}

# Each document is a revision; the command ends when it is ready.
apply() {
  each_file replace_service
}

replace_service() { # FILE
  in_project run services replace "$1" --region "$REGION"
}

ready() {
  each_model model_ready
}

model_ready() { # MODEL RESOURCE API_KEY_VARIABLE
  local status
  status="$(in_project run services describe "$2" --region "$REGION" --format 'value(status.conditions[0].status)')"
  if [ "$status" != True ]; then
    echo "the service $2 is not ready: gcloud run services describe $2 --region $REGION --project $PROJECT" >&2
    exit 1
  fi
}

# With an identity of the caller's: a service answers no others until it is made public.
call_model() { # MODEL RESOURCE API_KEY_VARIABLE
  local url token
  url="$(in_project run services describe "$2" --region "$REGION" --format 'value(status.url)')"
  token="$(gcloud auth print-identity-token)"
  ask "$url" "$1" "$3" "x-serverless-authorization: Bearer $token"
}

remove() {
  each_model remove_model
}

remove_model() { # MODEL RESOURCE API_KEY_VARIABLE
  if in_project run services describe "$2" --region "$REGION" >/dev/null 2>&1; then
    in_project run services delete "$2" --region "$REGION" --quiet
  fi
}
