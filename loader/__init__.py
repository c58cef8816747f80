"""Bytes in a store become verified tensors in memory. Knows no models and no HTTP server, and
imports no torch.
"""
