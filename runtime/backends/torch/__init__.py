"""The torch backend: the reference, the fallback of the native core, and the base of the CUDA
backend.
"""
