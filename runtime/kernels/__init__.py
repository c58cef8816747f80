"""Compiled kernels for decoding on a CPU: small matrix products that read the weights where the loader put them."""
