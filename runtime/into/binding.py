"""The binding of slots to values: tensors are laid over the load's memory, or values are copied
into theirs.

In place is the rule, and costs nothing: bytes then land where the module computes. Copied on
arrival are: another dtype or device, a layout that is not contiguous, memory shared with other
slots, a stored tensor that fills several slots. Either way every tensor object keeps its identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ...loader.errors import UsageError
from ...loader.load.load import WeightLoad
from ..errors import ModelError
from .match import Filling
from .slots import Slot
from .views import tensor_over

Action = Callable[[], None]


def check_bindable(fillings: Iterable[Filling]) -> None:
    """Raise `ModelError` for tensors on the meta device that cannot be given memory in place."""
    for filling in fillings:
        if filling.slot.tensor.is_meta and filling.slot.overlaps:
            raise ModelError(
                f"{filling.slot.name} is on the meta device and shares part of its memory with another tensor",
                hint="Build the module under `with teneral.empty_weights():` instead of on the meta device.",
            )


def bind(fillings: Iterable[Filling], load: WeightLoad) -> dict[int, list[Action]]:
    """Give every slot its memory. Returns the remaining actions for each group, to run once it has
    arrived.

    The actions may run in any order and from any thread.
    """
    actions: dict[int, list[Action]] = defaultdict(list)
    laid: set[int] = set()  # tensors of the file already in use as a slot's memory
    for slot, entry, twins in ((each.slot, each.entry, each.twins) for each in fillings):
        stored = tensor_over(load, entry)
        if entry.index not in laid and _fits_in_place(slot, stored):
            laid.add(entry.index)
            for tensor in slot.tensors:
                _point_at(tensor, stored)
        else:
            _give_memory(slot)
            actions[entry.group].append(_copy(slot, stored))
        for twin in twins:
            # Whichever of the two groups arrives last finds both.
            compare = _compare(slot, stored, tensor_over(load, twin), twin.name)
            for group in {entry.group, twin.group}:
                actions[group].append(_when_ready(load, {entry.group, twin.group} - {group}, compare))
    return actions


def _fits_in_place(slot: Slot, stored: torch.Tensor) -> bool:
    tensor = slot.tensor
    return (
        tensor.dtype == stored.dtype
        and tensor.device.type in ("cpu", "meta")
        and tensor.is_contiguous()
        and not slot.overlaps
    )


def _point_at(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Make `tensor`, the same object as before, show `memory`. Its old memory is released."""
    if not tensor.is_meta:
        tensor.data = memory
        return
    # The meta device's tensors have another internal type, so only a swap keeps the object.
    other = (
        nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory.detach()
    )
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"a tensor on the meta device cannot be given memory: {error}",
            hint="Build the module under `with teneral.empty_weights():` instead of on the meta device.",
        ) from error


def _give_memory(slot: Slot) -> None:
    tensor = slot.tensor
    if tensor.is_meta:
        memory = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        for each in slot.tensors:
            _point_at(each, memory)


def _copy(slot: Slot, stored: torch.Tensor) -> Action:
    def copy() -> None:
        slot.tensor.data.copy_(stored)

    return copy


def _compare(slot: Slot, stored: torch.Tensor, twin: torch.Tensor, twin_name: str) -> Action:
    def compare() -> None:
        if stored.dtype != twin.dtype or not torch.equal(_bits(stored), _bits(twin)):
            raise ModelError(
                f"{' and '.join(slot.names[:4])} are one tensor in the module, but {twin_name} is another in the file",
                hint="Untie them in the module, or leave one out with rename=.",
            )

    return compare


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)  # also equal where values are NaN


def _when_ready(load: WeightLoad, groups: Iterable[int], action: Action) -> Action:
    def act() -> None:
        if all(load.is_ready(group) for group in groups):
            action()

    return act
