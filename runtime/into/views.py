"""Tensors over a load's memory, each with a storage of its own size.

So what torch does with storages means one tensor, not its whole group: saving, copying and sharing it, and finding
out which tensors are tied.
"""

from __future__ import annotations

import torch

from ...loader.format.manifest import Tensor
from ...loader.load.load import WeightLoad
from ..backends.torch.tensors import TORCH_DTYPES
from ..errors import ModelError


def torch_dtype(entry: Tensor) -> torch.dtype:
    """Raises `ModelError` for a dtype that torch, or this version, does not know."""
    try:
        return TORCH_DTYPES[entry.dtype]
    except KeyError:
        raise ModelError(
            f"tensor {entry.name} has dtype {entry.dtype}, which cannot become a tensor"
        ) from None


def tensor_over(load: WeightLoad, entry: Tensor) -> torch.Tensor:
    """The tensor in its dtype and shape, on the CPU, contiguous; unfilled until its group is there.

    It keeps the memory of the whole load alive.
    """
    dtype = torch_dtype(entry)
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    stored = load.slab(entry.group)[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return torch.frombuffer(stored, dtype=torch.uint8).view(dtype).view(entry.shape)
