"""Ways to compute: each hands its executors to the models, which know none of them."""
