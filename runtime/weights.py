"""A model's weights as torch tensors whose storage exists at once and whose content arrives later.

`Weights` is what model code sees. `StreamedWeights` is fed by the loader; `DictWeights` holds finished
tensors (tests, and models made in memory). Neither knows what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from ..loader.format.manifest import Tier
from ..loader.stream.rows import RowParts
from .errors import ModelError

if TYPE_CHECKING:
    from ..loader.stream.load import WeightLoad
    from ..loader.stream.process_load import ProcessLoad

Gate = Callable[
    [], None
]  # blocks until some weights are exact; raises the load's error; costs next to nothing once open

RowGate = Callable[
    [torch.Tensor], None
]  # the same, for the rows of a matrix that it is called with, integers

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class Weights(Protocol):
    """Names are those of the checkpoint. A tensor's storage never moves, so views of it may be kept."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, filled or not. Raises `ModelError` naming the tensor when there is none."""

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> Iterator[str]: ...

    def gate(self, names: Iterable[str]) -> Gate:
        """A gate that opens when all these tensors hold their exact values. Unknown names are ignored."""

    def row_gate(self, table: str, names: Iterable[str]) -> RowGate:
        """A gate that opens when the rows of `table` that it is called with, and all the other tensors, hold their
        exact values: these come before all else then. Unknown names are ignored.
        """


class DictWeights:
    """Weights that are all there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise missing_tensor(name, self._tensors) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def gate(self, names: Iterable[str]) -> Gate:
        return lambda: None

    def row_gate(self, table: str, names: Iterable[str]) -> RowGate:
        gate = self.gate([table, *names])
        return lambda rows: gate()


class StreamedWeights:
    """Weights that a `WeightLoad` is filling. The tensors are views of the load's slabs, which they keep
    alive.
    """

    def __init__(self, load: WeightLoad | ProcessLoad) -> None:
        self._load = load
        self._tensors: dict[str, torch.Tensor] = {}
        self._slabs: dict[int, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            entry = self._load.manifest.by_name.get(name)
            if entry is None:
                raise missing_tensor(name, self._load.manifest.by_name)
            if entry.dtype not in TORCH_DTYPES:
                raise ModelError(
                    f"tensor {name} has dtype {entry.dtype}, which this version cannot compute with"
                )
            dtype = TORCH_DTYPES[entry.dtype]
            if entry.size_bytes == 0:
                self._tensors[name] = torch.empty(entry.shape, dtype=dtype)
            else:
                slab = self._slab(entry.group)
                stored = slab[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
                self._tensors[name] = stored.view(dtype).view(entry.shape)
        return self._tensors[name]

    def _slab(self, group: int) -> torch.Tensor:
        """The group's memory, (slab_bytes,) uint8: one storage, so that adjacent tensors can be stacked as
        one view.
        """
        if group not in self._slabs:
            self._slabs[group] = torch.frombuffer(self._load.slab(group), dtype=torch.uint8)
        return self._slabs[group]

    def __contains__(self, name: object) -> bool:
        return name in self._load.manifest.by_name

    def names(self) -> Iterator[str]:
        return iter(self._load.manifest.by_name)

    def gate(self, names: Iterable[str]) -> Gate:
        by_name = self._load.manifest.by_name
        groups = sorted({by_name[name].group for name in names if name in by_name})
        load = self._load

        def wait() -> None:
            for group in groups:
                load.wait(group, Tier.REFINE)

        return wait

    def row_gate(self, table: str, names: Iterable[str]) -> RowGate:
        load, manifest = self._load, self._load.manifest
        present = [name for name in {table, *names} if name in manifest.by_name]
        groups = {manifest.by_name[name].group for name in present}
        others: set[int] = set().union(*(RowParts(manifest, name).all for name in present if name != table))
        table_parts = RowParts(manifest, table) if table in present else None

        def wait(rows: torch.Tensor) -> None:
            if all(load.is_ready(group) for group in groups):
                return
            held = table_parts.holding(rows.flatten().tolist()) if table_parts is not None else set()
            load.wait_parts(others | held)

        return wait


def missing_tensor(name: str, present: Iterable[str]) -> ModelError:
    """The error for a tensor that is not there, with the names that look most like it."""
    import difflib  # only on the way to an error

    near = difflib.get_close_matches(name, list(present), n=2)
    return ModelError(
        f"the model has no tensor {name!r}",
        hint=f"Nearest names: {', '.join(near)}."
        if near
        else "Is this the right artifact for its config.json?",
    )
