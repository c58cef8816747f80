"""Weights into any `torch.nn.Module`, or into a dict of tensors: the parts that know torch but no model family."""
