"""The matching of a file's tensors to a module's slots, by names, shapes and dtypes alone.

The matching reads and changes nothing. A file often holds a model with a head, and the module is the model
without it, or the other way round: then one prefix distinguishes all their names, and it is found.

The binding of slots to values: tensors are laid over the load's memory, or values are copied
into theirs.

In place is the rule, and costs nothing: bytes then land where the module computes. Copied on
arrival are: another dtype or device, a layout that is not contiguous, memory shared with other
slots, a stored tensor that fills several slots. Either way every tensor object keeps its identity.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest, Tensor
from ...loader.load.load import WeightLoad
from ..errors import ModelError
from .slots import Slot, Slots, tensor_over, torch_dtype

Rename = Callable[[str], str | None]

_MAX_SHOWN = 8  # names in a message
_MAX_PREFIXES = 8  # candidates of each side


class WeightsMismatchError(ModelError):
    """The file does not fit the module, which is unchanged. Keys are the names of the module or the
    file.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_keys: Iterable[str] = (),
        unexpected_keys: Iterable[str] = (),
        mismatched_keys: Iterable[str] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing_keys = tuple(missing_keys)
        self.unexpected_keys = tuple(unexpected_keys)
        self.mismatched_keys = tuple(mismatched_keys)


@dataclass(frozen=True, slots=True)
class Filling:
    """A slot and the tensor that fills it. `twins` are further tensors of the file for the same
    slot: a tied weight stored under each of its names.
    """

    slot: Slot
    entry: Tensor
    twins: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Match:
    fillings: tuple[Filling, ...]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def match_weights(slots: Slots, manifest: Manifest, *, strict: bool, rename: Rename | None) -> Match:
    """Match the slots of a module to the tensors of a file.

    Raises `WeightsMismatchError` if shapes or kinds of dtype differ; with `strict`, also if a name
    has no counterpart. Without `strict`, a slot without any values (on the meta device) is still
    refused.
    """
    slot_of = {name: slot for slot in slots.slots for name in slot.names}
    file_names = manifest.by_name
    new_names = rename_all(file_names, slot_of, rename)
    entries_of: dict[str, list[Tensor]] = {}  # by the slot's first name
    unexpected: list[str] = []
    for file_name, name in new_names.items():
        if name in slot_of:
            entries = entries_of.setdefault(slot_of[name].name, [])
            if file_names[file_name] not in entries:
                entries.append(file_names[file_name])
        elif name is not None and name not in slots.computed:
            unexpected.append(file_name)
    missing = [slot.name for slot in slots.slots if slot.name not in entries_of]
    if strict and (missing or unexpected):
        raise _different_names(missing, unexpected)
    if without_values := [name for name in missing if slot_of[name].tensor.is_meta]:
        raise WeightsMismatchError(
            f"not in the file, and on the meta device, so without values: {_list(without_values)}",
            missing_keys=without_values,
            hint="Build those on a real device and initialise them, or load a file that has them.",
        )
    fillings = tuple(
        Filling(slot, entries_of[slot.name][0], tuple(entries_of[slot.name][1:]))
        for slot in slots.slots
        if slot.name in entries_of
    )
    _check_fit(fillings)
    return Match(fillings, tuple(missing), tuple(unexpected))


def rename_all(
    file_names: Collection[str], module_names: Collection[str], rename: Rename | None
) -> dict[str, str | None]:
    """The module's name for each of the file's names; None for names that the user leaves out.

    Without `rename`, names are unchanged, or get or lose the one prefix that maps the most of them
    to the module's. Raises `WeightsMismatchError` if two names become one.
    """
    if rename is None:
        rename = _find_prefix(file_names, module_names)
    renamed: dict[str, str | None] = {}
    taken: dict[str, str] = {}
    for file_name in file_names:
        name = renamed[file_name] = rename(file_name)
        if name is None:
            continue
        if name in taken:
            raise WeightsMismatchError(
                f"{taken[name]} and {file_name} both become {name}", unexpected_keys=(taken[name], file_name)
            )
        taken[name] = file_name
    return renamed


def _find_prefix(file_names: Collection[str], module_names: Collection[str]) -> Rename:
    known = set(module_names)

    def strip(prefix: str) -> Rename:
        return lambda name: name if name in known else name.removeprefix(prefix)

    def add(prefix: str) -> Rename:
        return lambda name: name if name in known else prefix + name

    candidates: list[Rename] = [lambda name: name]
    candidates += [strip(prefix) for prefix in _first_words(file_names)]
    candidates += [add(prefix) for prefix in _first_words(module_names)]
    # The first of the best: names are unchanged unless a prefix makes more of them fit.
    return max(candidates, key=lambda candidate: sum(candidate(name) in known for name in file_names))


def _first_words(names: Iterable[str]) -> list[str]:
    """The most common first words only: names are untrusted, and each prefix costs a pass over all
    of them.
    """
    words = Counter(name.partition(".")[0] + "." for name in names if "." in name)
    return [word for word, _ in words.most_common(_MAX_PREFIXES)]


def _check_fit(fillings: Iterable[Filling]) -> None:
    problems: dict[str, str] = {}
    for filling in fillings:
        wanted = filling.slot.tensor
        for entry in (filling.entry, *filling.twins):
            if entry.shape != tuple(wanted.shape):
                problems[filling.slot.name] = f"is {list(wanted.shape)}, the file has {list(entry.shape)}"
            elif _kind(torch_dtype(entry)) != _kind(wanted.dtype):
                problems[filling.slot.name] = f"is {wanted.dtype}, the file has {entry.dtype}"
    if problems:
        shown = [f"{name} {problem}" for name, problem in problems.items()]
        raise WeightsMismatchError(
            f"{len(problems)} tensors do not fit the module: {_list(shown, '; ')}",
            mismatched_keys=problems,
            hint="Build the module from the config.json that belongs to these weights.",
        )


def _kind(dtype: torch.dtype) -> str:
    """The kind of a dtype. Values are converted within a kind; between kinds, a conversion would
    hide a mistake.
    """
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype is torch.bool else "integer"


def _different_names(missing: list[str], unexpected: list[str]) -> WeightsMismatchError:
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the module's tensors are not in the file: {_list(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} of the file's tensors are not in the module: {_list(unexpected)}")
    return WeightsMismatchError(
        "; ".join(parts),
        missing_keys=missing,
        unexpected_keys=unexpected,
        hint="Pass rename= to translate the file's names, or strict=False to load the common ones.",
    )


def _list(items: Collection[str], separator: str = ", ") -> str:
    shown = separator.join(list(items)[:_MAX_SHOWN])
    return shown if len(items) <= _MAX_SHOWN else f"{shown}{separator}… ({len(items)} in all)"


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
