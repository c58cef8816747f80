"""Generation on a CUDA device through the driver alone: no torch, no allocator, no capture.

After start-up every address is fixed. Weights are one allocation, keys and values one, and
activations an arena whose layout follows from the model and its limits. So a step is a list of
packed launches, or a graph of them, and what varies between steps is read from one buffer.
"""
