"""The tensors of one group as views of its slab, on any device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from ...loader.format.manifest import Manifest
from .views import torch_dtype


def tensors_in(
    manifest: Manifest, group: int, slab: torch.Tensor, names: dict[int, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The group's tensors in slab order, each under all of its `names`. `slab`: (slab_bytes,)
    uint8, on any device.

    They share the slab's storage. Raises `ModelError` for a dtype that torch does not know.
    """
    for index in manifest.groups[group].tensors:
        entry = manifest.tensors[index]
        stored = slab[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        tensor = stored.view(torch_dtype(entry)).view(entry.shape)
        for name in names[index]:
            yield name, tensor


def names_of(manifest: Manifest) -> dict[int, list[str]]:
    """All names of each tensor, by its number: its own, then its aliases."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in manifest.by_name.items():
        names[tensor.index].append(name)
    return names
