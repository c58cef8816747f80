"""Loading of weights into any `torch.nn.Module`, or into a dict of tensors. Knows torch, but no
model family.
"""
