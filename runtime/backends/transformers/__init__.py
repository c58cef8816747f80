"""Models of unknown architectures, computed by the transformers library: slow, and only where it is installed."""
