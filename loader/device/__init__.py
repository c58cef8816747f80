"""Weights in the memory of another device: what is uploaded, what the device does with it, and when
it is there.
"""
