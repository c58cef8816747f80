"""A module's slots: its parameters and persistent buffers, with tied ones as one slot.

Tied means the same object under several names, or several objects over exactly the same memory.
This module does not know the source of the values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ...loader.errors import UsageError
from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of memory that a module computes with."""

    # All its names in the module's state dict, in the module's order.
    names: tuple[str, ...]
    # The objects over it: one, unless several were tied by their memory.
    tensors: tuple[torch.Tensor, ...]
    overlaps: bool  # some of its memory belongs to another slot, too

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> torch.Tensor:
        return self.tensors[0]


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a module. `computed` are the names of buffers that the module computes itself,
    never from a file.
    """

    slots: tuple[Slot, ...]
    computed: frozenset[str]


def find_slots(module: nn.Module) -> Slots:
    """Find the slots of a module. Raises `ModelError`, naming the first parameter without plain
    memory.
    """
    by_memory: dict[object, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _persistent_tensors(module):
        _check_plain(name, tensor)
        by_memory[_memory_key(tensor)].append((name, tensor))
    num_slots_in: dict[int, int] = defaultdict(int)  # by storage
    for members in by_memory.values():
        num_slots_in[_storage_id(members[0][1])] += 1
    slots = tuple(
        Slot(
            names=tuple(name for name, _ in members),
            tensors=tuple({id(tensor): tensor for _, tensor in members}.values()),
            overlaps=members[0][1].numel() > 0 and num_slots_in[_storage_id(members[0][1])] > 1,
        )
        for members in by_memory.values()
    )
    return Slots(slots, frozenset(_computed_buffers(module)))


def check_module(module: nn.Module) -> None:
    """Raise `UsageError` for an object that is not a module, or whose forward cannot be made to
    wait.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"weights go into a torch.nn.Module, not into a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            "a TorchScript module cannot be loaded into",
            hint="Load into the original Python module, and script it afterwards.",
        )


def _persistent_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors and their names in `state_dict`, as without compilation: shared modules and
    tensors under each of their names.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}.".replace("_orig_mod.", "") if path else ""
        for name, tensor in owner._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor
        for name, tensor in owner._buffers.items():
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield prefix + name, tensor


def _computed_buffers(module: nn.Module) -> Iterator[str]:
    """The names of computed buffers. Raises `ModelError` for one on the meta device, because it has
    no values.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers.get(name)
            full_name = f"{path}.{name}" if path else name
            if buffer is not None and buffer.is_meta:
                raise ModelError(
                    f"buffer {full_name} is on the meta device, and no file holds its values",
                    hint="Build the module under `with teneral.empty_weights():` instead of on the meta device: "
                    "it costs no memory either, and computes such buffers.",
                )
            yield full_name


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(
            f"{name} has no shape yet: it belongs to a lazy module",
            hint="Call the module once with an example input first.",
        )
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
        raise ModelError(
            f"{name} is a {kind}, which cannot be filled with plain weights",
            hint="Load first, then quantise, shard or convert the module.",
        )


def _memory_key(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return _storage_id(tensor), *place


def _storage_id(tensor: torch.Tensor) -> int:
    """A key that distinguishes storages, also those on the meta device, which have no addresses."""
    number: int = tensor.untyped_storage()._cdata
    return number
