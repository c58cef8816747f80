apply() {
  each_file apply_file
}
