"""Generating on a CUDA device. What is not on one never imports this."""
