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
