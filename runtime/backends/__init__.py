"""The backends. Each passes its executors to the models, which import none of them."""
