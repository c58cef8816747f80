"""A model's weights as arrays whose storage exists at once and whose content arrives later.

`Weights` is the interface for model code. `StreamedWeights` is filled by the loader; `DictWeights`
holds finished tensors (tests, and models made in memory). Neither knows the use of the tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..loader.format.manifest import Tier
from ..loader.load.plan import RowParts
from .errors import ModelError, missing_tensor
from .tensors import DType, Tensor

if TYPE_CHECKING:
    from ..loader.load.base import AnyLoad, PlacedLoad
    from ..loader.load.experts import Pager


Rows = npt.NDArray[np.int64]
MAX_STRIPS = 16  # of a table: what is left behind its last byte is short, and so is what each costs


class Gate(Protocol):
    """A gate for the content of some weights. Costs next to nothing once they are exact, since they
    then stay unchanged.
    """

    def __call__(self) -> None:
        """Block until they are exact. Raises the load's error."""

    def opens(self, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        """True if they have at least `tier` now, or within this time. Raises the load's error."""

    def reading(self, tier: Tier) -> AbstractContextManager[None]:
        """Block until they have at least `tier`. They do not change inside. One thread at a time."""


class RowGate(Protocol):
    """A gate for the rows of a matrix in its arguments (integers, any shape), which it also
    prioritises.
    """

    def __call__(self, rows: Rows) -> None: ...

    def opens(self, rows: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool: ...

    def reading(self, rows: Rows, tier: Tier) -> AbstractContextManager[None]: ...

    def want(self, rows: Rows, tier: Tier) -> None:
        """Request these rows, in all tiers up to this one, and return at once."""


class ExpertGate(Protocol):
    """A gate for some experts of a layer, by their numbers (integers, ascending)."""

    def want(self, experts: Rows, tier: Tier = Tier.REFINE) -> None:
        """Request these, in all tiers up to this one, before all others. Returns at once."""

    def opens(self, experts: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        """True if they have at least `tier` now, or within this time. Raises the load's error."""

    def reading(self, experts: Rows, tier: Tier = Tier.REFINE) -> AbstractContextManager[None]:
        """Block until they have at least `tier`. They do not change inside the context, and are
        those of the last `want`. Raises the load's error. One thread at a time.
        """


class Strip(NamedTuple):
    """The rows [first, end) of a table, and the gate of all that is needed for them."""

    first: int
    end: int
    gate: Gate


class Weights(Protocol):
    """The weights by their names in the checkpoint. A tensor's storage never moves, so views of it
    may be kept.
    """

    def tensor(self, name: str) -> Tensor:
        """The tensor, filled or not. Raises `ModelError`, naming a missing tensor."""

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> Iterator[str]: ...

    def gate(self, names: Iterable[str]) -> Gate:
        """A gate that opens once all these tensors are exact. Unknown names are ignored."""

    def row_gate(self, tables: Collection[str], names: Iterable[str]) -> RowGate:
        """A gate that opens once the rows of each of `tables` in its arguments, and all the other tensors,
        are exact: these are then loaded first. Unknown names are ignored.
        """

    def strips(self, table: str, names: Iterable[str]) -> tuple[Strip, ...]:
        """All rows of `table`, ascending, behind the other tensors; none where they arrive together."""

    def expert_gate(self, names: Sequence[Iterable[str]]) -> ExpertGate:
        """A gate for experts; `names` are each one's tensors. Unknown names are ignored."""

    def stacked_expert_gate(self, names: Iterable[str]) -> ExpertGate:
        """A gate for experts that are rows of these tensors, which must be there."""


class DictWeights:
    """Weights that are complete."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise missing_tensor(name, self._tensors) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def gate(self, names: Iterable[str]) -> Gate:
        return _Open()

    def row_gate(self, tables: Collection[str], names: Iterable[str]) -> RowGate:
        return _WholeTable(self.gate([*tables, *names]))

    def strips(self, table: str, names: Iterable[str]) -> tuple[Strip, ...]:
        return ()

    def expert_gate(self, names: Sequence[Iterable[str]]) -> ExpertGate:
        return _OpenExperts()

    def stacked_expert_gate(self, names: Iterable[str]) -> ExpertGate:
        return _OpenExperts()


class StreamedWeights:
    """Weights that a load is filling. The arrays are views of the load's slabs, which they keep
    alive.
    """

    def __init__(self, load: AnyLoad) -> None:
        self._load = load
        self._tensors: dict[str, Tensor] = {}
        self._slabs: dict[int, npt.NDArray[np.uint8]] = {}

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            entry = self._load.manifest.by_name.get(name)
            if entry is None:
                raise missing_tensor(name, self._load.manifest.by_name)
            if entry.dtype not in DType.__members__:
                raise ModelError(
                    f"tensor {name} has dtype {entry.dtype}, which this version does not support"
                )
            begin = entry.offset_bytes
            self._tensors[name] = self._view(
                entry.group, begin, begin + entry.size_bytes, DType(entry.dtype), entry.shape
            )
        return self._tensors[name]

    def _view(self, group: int, begin: int, end: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """The bytes [begin, end) of the group's memory."""
        if begin == end:
            return Tensor(dtype, np.empty(shape, dtype.numpy))
        # One array, so that adjacent tensors can be stacked as one view.
        if group not in self._slabs:
            assert self._load.place == "host"
            self._slabs[group] = self._load.slab(group)
        return Tensor(dtype, self._slabs[group][begin:end].view(dtype.numpy).reshape(shape))

    def __contains__(self, name: object) -> bool:
        return name in self._load.manifest.by_name

    def names(self) -> Iterator[str]:
        return iter(self._load.manifest.by_name)

    def gate(self, names: Iterable[str]) -> Gate:
        by_name = self._load.manifest.by_name
        return _GroupGate(self._load, {by_name[name].group for name in names if name in by_name})

    def row_gate(self, tables: Collection[str], names: Iterable[str]) -> RowGate:
        return _TableGate(self._load, tables, names)

    def strips(self, table: str, names: Iterable[str]) -> tuple[Strip, ...]:
        by_name = self._load.manifest.by_name
        runs = RowParts(self._load.manifest, table).runs(MAX_STRIPS) if table in by_name else []
        if len(runs) < 2:
            return ()
        gate = _TableGate(self._load, [table], names, asks=False)
        ends = [*(run[0] for run in runs[1:]), by_name[table].shape[0]]
        return tuple(Strip(run[0], end, _StripGate(gate, run)) for run, end in zip(runs, ends, strict=True))

    def expert_gate(self, names: Sequence[Iterable[str]]) -> ExpertGate:
        by_name, load = self._load.manifest.by_name, self._load
        groups = [{by_name[name].group for name in own if name in by_name} for own in names]
        if load.experts is not None and load.paged_groups.issuperset(chain(*groups)):
            return _PagedExperts(load.experts, groups)  # whose numbers are those of their pages
        return _GroupedExperts(load, groups)

    def stacked_expert_gate(self, names: Iterable[str]) -> ExpertGate:
        load, tensors = self._load, [self._load.manifest.by_name[name] for name in names]
        if tensors[0].group in load.paged_groups:
            assert load.experts is not None
            numbers = load.experts.pages_of(tensors[0].group)
            return _PagedExperts(load.experts, [(number,) for number in numbers])
        return _StackedExperts(load, [tensor.name for tensor in tensors])


class _Open:
    """The gate of complete weights."""

    def __call__(self) -> None:
        pass

    def opens(self, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return True

    def reading(self, tier: Tier) -> AbstractContextManager[None]:
        return nullcontext()


class _WholeTable:
    """The gate of rows that arrive with all others."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, rows: Rows) -> None:
        self._gate()

    def opens(self, rows: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return self._gate.opens(timeout_s, tier)

    def reading(self, rows: Rows, tier: Tier) -> AbstractContextManager[None]:
        return self._gate.reading(tier)

    def want(self, rows: Rows, tier: Tier) -> None:
        pass


class _OpenExperts:
    """The gate of experts that are complete."""

    def want(self, experts: Rows, tier: Tier = Tier.REFINE) -> None:
        pass

    def opens(self, experts: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return True

    def reading(self, experts: Rows, tier: Tier = Tier.REFINE) -> AbstractContextManager[None]:
        return nullcontext()


class _GroupGate:
    """The gate of whole groups."""

    def __init__(self, load: AnyLoad, groups: Iterable[int]) -> None:
        self._load = load
        self._groups = sorted(groups)
        self._num_exact = 0  # of the groups, the first ones: seen to be exact, and so for good

    def __call__(self) -> None:
        for group in self._groups:
            self._load.wait(group)
        _order_after(self._load, self._groups)

    def opens(self, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        deadline_s = time.monotonic() + timeout_s
        try:
            # A mixture has thousands of groups.
            for number in range(self._num_exact, len(self._groups)):
                group = self._groups[number]
                if not self._load.is_ready(group, tier):
                    self._load.wait(group, tier, max(0.0, deadline_s - time.monotonic()))
                if tier is Tier.REFINE:
                    self._num_exact = number + 1
        except TimeoutError:
            return False
        if tier is Tier.REFINE:
            _order_after(self._load, self._groups)
        return True

    @contextmanager
    def reading(self, tier: Tier) -> Iterator[None]:
        for group in self._groups:
            self._load.wait(group, tier)
        with _unchanged(self._load, self._groups):
            yield


class _TableGate:
    """The gate of some rows of tables and of the other named tensors, all in whole parts."""

    def __init__(
        self, load: AnyLoad, tables: Collection[str], names: Iterable[str], *, asks: bool = True
    ) -> None:
        self._load, self._asks = load, asks
        manifest = load.manifest
        present = [name for name in {*tables, *names} if name in manifest.by_name]
        self._groups = sorted({manifest.by_name[name].group for name in present})
        self._others: set[int] = set().union(
            *(RowParts(manifest, name).all for name in present if name not in tables)
        )
        self._tables = [RowParts(manifest, name) for name in present if name in tables]
        self._tiers = [part.tier for part in manifest.parts]
        # A tier that the artifact lacks counts as present with the first one that it has.
        self._lowest = min(self._tiers, default=Tier.REFINE)

    def __call__(self, rows: Rows) -> None:
        if not self._is_open():
            self._load.wait_parts(self._parts(rows), asks=self._asks)
        _order_after(self._load, self._groups)

    def opens(self, rows: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        if not self._is_open():
            try:
                self._load.wait_parts(self._parts(rows, tier), timeout_s, asks=self._asks)
            except TimeoutError:
                return False
        if tier is Tier.REFINE:
            _order_after(self._load, self._groups)
        return True

    @contextmanager
    def reading(self, rows: Rows, tier: Tier) -> Iterator[None]:
        if not self._is_open():
            self._load.wait_parts(self._parts(rows, tier), asks=self._asks)
        with _unchanged(self._load, self._groups):
            yield

    def want(self, rows: Rows, tier: Tier) -> None:
        if not self._is_open():
            self._load.want_parts(self._parts(rows, tier))

    def _is_open(self) -> bool:
        return all(self._load.is_ready(group) for group in self._groups)

    def _parts(self, rows: Rows, tier: Tier = Tier.REFINE) -> set[int]:
        numbers = rows.ravel().tolist()
        held = self._others.union(*(table.holding(numbers) for table in self._tables))
        return {number for number in held if self._tiers[number] <= max(tier, self._lowest)}


class _StripGate:
    """The gate of some rows of a table that stay the same."""

    def __init__(self, table: RowGate, rows: Sequence[int]) -> None:
        self._table, self._rows = table, np.array(rows)

    def __call__(self) -> None:
        self._table(self._rows)

    def opens(self, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return self._table.opens(self._rows, timeout_s, tier)

    def reading(self, tier: Tier) -> AbstractContextManager[None]:
        return self._table.reading(self._rows, tier)


class _GroupedExperts:
    """The gate of experts whose groups arrive one by one, in any order."""

    def __init__(self, load: AnyLoad, groups: Sequence[Collection[int]]) -> None:
        """`groups` are each expert's; usually it has one of its own."""
        self._load = load
        self._groups = groups

    def want(self, experts: Rows, tier: Tier = Tier.REFINE) -> None:
        manifest = self._load.manifest
        parts = [
            part.index
            for group in self._of(experts)
            if not self._load.is_ready(group, tier)
            for each in Tier
            if each <= tier
            for part in manifest.parts_of(group, each)
        ]
        if parts:
            self._load.want_parts(parts)

    def opens(self, experts: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return _GroupGate(self._load, self._of(experts)).opens(timeout_s, tier)

    @contextmanager
    def reading(self, experts: Rows, tier: Tier = Tier.REFINE) -> Iterator[None]:
        gate = _GroupGate(self._load, self._of(experts))
        if tier is Tier.REFINE:
            gate()
            yield
        else:
            with gate.reading(tier):
                yield

    def _of(self, experts: Rows) -> set[int]:
        return {group for expert in experts.tolist() for group in self._groups[expert]}


class _StackedExperts:
    """The gate of experts that are rows of the same tensors, and arrive in parts, in any order."""

    def __init__(self, load: AnyLoad, names: Collection[str]) -> None:
        self._load = load
        self._names = names

    @cached_property
    def _rows(self) -> _TableGate:
        """Made at the first use: a whole load needs none, and a layer has hundreds of parts."""
        return _TableGate(self._load, self._names, ())

    def want(self, experts: Rows, tier: Tier = Tier.REFINE) -> None:
        self._rows.want(experts, tier)

    def opens(self, experts: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return self._rows.opens(experts, timeout_s, tier)

    @contextmanager
    def reading(self, experts: Rows, tier: Tier = Tier.REFINE) -> Iterator[None]:
        if tier is Tier.REFINE:
            self._rows(experts)
            yield
        else:
            with self._rows.reading(experts, tier):
                yield


class _PagedExperts:
    """The gate of experts that are in memory only while they are used."""

    def __init__(self, pager: Pager, pages: Sequence[Collection[int]]) -> None:
        """`pages` are each expert's."""
        self._pager = pager
        self._pages = pages

    def want(self, experts: Rows, tier: Tier = Tier.REFINE) -> None:
        self._pager.want(self._of(experts))

    def opens(self, experts: Rows, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        return self._pager.wait(self._of(experts), timeout_s)

    @contextmanager
    def reading(self, experts: Rows, tier: Tier = Tier.REFINE) -> Iterator[None]:
        self._pager.wait(self._of(experts))
        yield

    def _of(self, experts: Rows) -> set[int]:
        return {page for expert in experts.tolist() for page in self._pages[expert]}


@contextmanager
def _unchanged(load: AnyLoad, groups: Iterable[int]) -> Iterator[None]:
    """A context in which none of the groups is refined; on another device, no work launched inside
    sees it refined.

    Locks in ascending order, so that two callers cannot deadlock.
    """
    with ExitStack() as stack:
        for group in groups:
            if load.is_ready(group):
                _order_after(load, (group,))
            elif load.place == "device":
                stack.enter_context(load.reading(group, _stream_of(load)))
            else:
                stack.enter_context(load.reading(group))
        yield


def _order_after(load: AnyLoad, groups: Iterable[int]) -> None:
    """Order this thread's later launches after the placement of the groups. No effect on the host."""
    if load.place == "device":
        load.order_after(groups, _stream_of(load))


def _stream_of(load: PlacedLoad) -> int:
    """The stream that this thread launches on; 0, the default one, for devices unknown to torch."""
    name = load.device_name
    if not name.startswith("cuda"):
        return 0
    torch: Any = sys.modules["torch"]  # imported by any code that computes there
    return int(torch.cuda.current_stream(torch.device(name)).cuda_stream)
