"""Generation on a CUDA device. Processes without a device import nothing of this package but what
describes a model (`implemented.py`).
"""
