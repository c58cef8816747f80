"""What a device computes, in Triton's language: plain functions, which `variants.py` names and a launcher compiles."""
