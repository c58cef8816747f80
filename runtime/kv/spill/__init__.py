"""Spilling: copies of the pool's blocks in host memory and on a local disk."""
