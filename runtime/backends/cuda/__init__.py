"""Generation on a CUDA device. Processes without a device never import this package."""
