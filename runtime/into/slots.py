"""A module's slots: its parameters and persistent buffers, with tied ones as one slot, and the tensors
that are laid into them.

A module to be loaded is constructed without random numbers and memory that are never read.

Each tensor over a load's memory has a storage of its own size: torch's operations on storages
therefore apply to one tensor, not to its whole group: saving, copying and sharing it, and detecting
tied tensors.

Tied means the same object under several names, or several objects over exactly the same memory.
This module does not know the source of the values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest, Tensor
from ...loader.load.load import WeightLoad
from ..backends.torch.tensors import TORCH_DTYPES
from ..errors import ModelError

_RANDOM_FILLS = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "log_normal_", "exponential_", "geometric_", "cauchy_",
    # The only function of torch.nn.init whose calls a mode does not see.
    "kaiming_uniform_",
})  # fmt: skip
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@contextmanager
def empty_weights() -> Iterator[None]:
    """Skip the random initialisation of parameters of modules built inside, in this thread.

    Everything else is unchanged: parameters are real and on their usual device, buffers are
    computed, and so are constants, such as a norm's ones. Untouched memory is not taken from the
    system. So

        with teneral.empty_weights():
            model = AutoModel.from_config(config)
        load = teneral.load_into(model, "s3://bucket/model")

    builds a model of any size in the time and memory of its skeleton. Parameters that a file then
    does not fill are undefined.
    """
    with _SkipRandomFills():
        yield


class _SkipRandomFills(TorchFunctionMode):
    """A mode that ignores in-place random fills of parameters, and of `.data` of parameters."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _RANDOM_FILLS:
            target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
            if isinstance(target, nn.Parameter) or getattr(target, "_teneral_is_data", False):
                return target
        result = func(*args, **kwargs)
        if func == _GET_DATA and isinstance(args[0], nn.Parameter):
            result._teneral_is_data = True
        return result


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
