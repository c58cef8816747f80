"""KServe: the Open Inference Protocol V2 over REST, with Triton's extensions for bytes, repositories and texts."""
