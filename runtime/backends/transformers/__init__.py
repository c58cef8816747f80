"""Models of unknown architectures, computed by the transformers library, if installed. Slow."""
