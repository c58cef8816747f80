"""Tensors over a load's memory, each with a storage of its own size.

torch's operations on storages therefore apply to one tensor, not to its whole group: saving,
copying and sharing it, and detecting tied tensors.
"""

from __future__ import annotations

import torch

from ...loader.format.manifest import Tensor
from ...loader.load.load import WeightLoad
from ..backends.torch.tensors import TORCH_DTYPES
from ..errors import ModelError


def torch_dtype(entry: Tensor) -> torch.dtype:
    """The torch dtype of an entry. Raises `ModelError` for a dtype that torch, or this version,
    does not know.
    """
    try:
        return TORCH_DTYPES[entry.dtype]
    except KeyError:
        raise ModelError(
            f"tensor {entry.name} has dtype {entry.dtype}, which cannot become a tensor"
        ) from None


def tensor_over(load: WeightLoad, entry: Tensor) -> torch.Tensor:
    """The tensor in its dtype and shape, on the CPU, contiguous; unfilled until its group arrives.

    It keeps the memory of the whole load alive.
    """
    dtype = torch_dtype(entry)
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    stored = load.slab(entry.group)[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return torch.frombuffer(stored, dtype=torch.uint8).view(dtype).view(entry.shape)
