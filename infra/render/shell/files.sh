check() {
  check_cluster
}

apply() {
  each_file apply_file
}

remove() {
  each_file remove_file
}
