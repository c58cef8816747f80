"""Triton kernels: plain functions, which `variants.py` names and a launcher compiles."""
