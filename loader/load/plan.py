"""The order in which a load takes its parts: the plan, a value made from the manifest, and the fetch
order, which starts as the plan's and puts steps first that a caller waits for.

Invariant: a step comes after every step that it needs. A part of a later tier replaces the low bits
of elements that parts of the tier before it wrote, so it needs each of those that holds one of
these elements, however the two tiers were cut, and what these need in turn. Nothing here does I/O,
waits, or knows where memory lies; how the parts are cut into ranges is decided while they are read
(`link.py`). The plan is pure; `FetchOrder` is not thread-safe: the work queue's lock guards it.

A forward pass needs few rows of its largest matrix, the embeddings: `RowParts` finds the parts that
hold them. Of a mixture it needs those experts that its tokens choose.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from ..format.layout import is_expert
from ..format.manifest import PLANE_ALIGNMENT_BYTES, Codec, Manifest, Part, Segment, Tier
from .options import Order

FIRST_GROUP = 0
MAX_RUN_STEPS = 64


class Step(NamedTuple):
    """One part's turn.

    `needs` are the numbers of all earlier steps that must be decoded before this one.
    `slab_offset_bytes` is where in its group's slab the part may be read as it is; None when it
    goes through staging because it has a digest to be verified or planes to be decoded.
    """

    number: int
    part: Part
    needs: tuple[int, ...]
    slab_offset_bytes: int | None


class Plan(NamedTuple):
    """Steps in the order in which they are fetched unless one of them is wanted sooner.

    `late` are the numbers of the parts that come last in their tiers, `optional` those, behind even
    these, which a pass may do without: of experts, and of tables that are not the head's, too.
    """

    steps: tuple[Step, ...]
    late: frozenset[int] = frozenset()
    optional: frozenset[int] = frozenset()

    @property
    def stored_bytes(self) -> int:
        return sum(step.part.size_bytes for step in self.steps)

    def numbers(self, order: Order) -> list[int]:
        """The numbers of all steps in another order, in which each comes after those that it needs,
        too.
        """
        steps = sorted(self.steps, key=lambda step: _rank(step.part, order, self._lateness(step.part)))
        return [step.number for step in steps]

    def _lateness(self, part: Part) -> int:
        return _lateness(part, self.late, self.optional)


def plan_load(
    manifest: Manifest,
    order: Order,
    *,
    on_demand: bool = False,
    direct: bool = True,
    without: frozenset[int] = frozenset(),
) -> Plan:
    """Put the manifest's parts in `order`, but for those that it is to be `without`, by number. Without
    `direct`, no part is read straight into a slab.

    With `on_demand`, what a forward pass asks for comes behind all others of the same tiers. The
    parts that hold nothing but tables: a table is a matrix of the first group that several parts
    share, a pass begins with a few of its rows, and where embeddings are tied to the head, it ends
    with the whole of it. Then the experts of mixtures.
    """
    needed = _needed_parts(manifest)
    late = frozenset(_table_parts(manifest, needed) if on_demand else ())
    optional = frozenset(_expert_parts(manifest) if on_demand else ())
    if optional and _has_own_head(manifest, late):
        optional |= late
    parts = sorted(
        (part for part in manifest.parts if part.index not in without),
        key=lambda part: _rank(part, order, _lateness(part, late, optional)),
    )
    numbers = {part.index: number for number, part in enumerate(parts)}
    steps = (
        Step(
            number,
            part,
            tuple(sorted(numbers[index] for index in needed.get(part.index, ()))),
            _direct_offset(manifest, part) if direct else None,
        )
        for number, part in enumerate(parts)
    )
    return Plan(tuple(steps), late, optional)


def follows(before: Step, step: Step) -> bool:
    """True if one range can read both parts: of one group and tier, one behind the other in their
    blob, and with one piece of memory to go to.
    """
    one, other = before.part, step.part
    distance_bytes = other.offset_bytes - one.offset_bytes
    if (one.blob, one.group, one.tier) != (other.blob, other.group, other.tier):
        return False
    if before.slab_offset_bytes is None or step.slab_offset_bytes is None:
        # Packed parts are aligned in their blob, so a few bytes may lie between them.
        near = one.size_bytes <= distance_bytes < one.size_bytes + PLANE_ALIGNMENT_BYTES
        return near and before.slab_offset_bytes is step.slab_offset_bytes
    return step.slab_offset_bytes - before.slab_offset_bytes == distance_bytes == one.size_bytes


def _lateness(part: Part, late: frozenset[int], optional: frozenset[int]) -> int:
    return 2 if part.index in optional else part.index in late


def _rank(part: Part, order: Order, lateness: int) -> tuple[int, int, int, int]:
    # What is not decided begins with the first tier, which costs nothing.
    if order is not Order.EXACT:
        return part.tier, lateness, part.group, part.index
    return lateness, part.group, part.tier, part.index


def expert_groups(manifest: Manifest) -> frozenset[int]:
    """The groups that hold one expert of a mixture each."""
    return frozenset(group.index for group in manifest.groups if is_expert(group.name))


def _has_own_head(manifest: Manifest, late: frozenset[int]) -> bool:
    """True if the last group has a matrix of as many rows as the tables in these parts: a pass then ends with that one,
    and needs no more of the tables than its rows.
    """
    tables = {segment.tensor for index in late for segment in manifest.parts[index].segments}
    rows = {manifest.tensors[number].shape[0] for number in tables}
    head = (manifest.tensors[number].shape for number in manifest.groups[-1].tensors)
    return any(len(shape) == 2 and shape[0] in rows for shape in head)


def _expert_parts(manifest: Manifest) -> Iterable[int]:
    groups = expert_groups(manifest)
    return (part.index for part in manifest.parts if part.group in groups)


def _table_parts(manifest: Manifest, needed: Mapping[int, set[int]]) -> set[int]:
    """Numbers of the parts that begin nothing but tables, and of those of later tiers that hold
    some of one, or need such a part.
    """
    candidates = [part for part in manifest.parts if part.group == FIRST_GROUP]
    num_parts = Counter(
        segment.tensor for part in candidates if part.index not in needed for segment in part.segments
    )
    tables = {
        tensor for tensor, num in num_parts.items() if num > 1 and len(manifest.tensors[tensor].shape) == 2
    }
    late: set[int] = set()
    for part in sorted(candidates, key=lambda part: part.tier):
        of_tables = (segment.tensor in tables for segment in part.segments)
        before = needed.get(part.index)
        # A later tier's part may need late parts as soon as one segment is a table's: then it is
        # late itself.
        if all(of_tables) if before is None else any(of_tables) or not late.isdisjoint(before):
            late.add(part.index)
    return late


def _needed_parts(manifest: Manifest) -> dict[int, set[int]]:
    """For each part that needs others, by its number, the numbers of all that must be decoded
    before it.
    """
    needed: dict[int, set[int]] = {}
    before: dict[
        int, list[tuple[int, int]]
    ] = {}  # by tensor: the last tier's stretches, first element and part
    ordered = sorted(manifest.parts, key=writing_order)
    for _, parts in groupby(ordered, writing_order):
        written: dict[int, list[tuple[int, int]]] = {}
        for part in parts:
            found: set[int] = set()
            for segment in part.segments:
                if stretches := before.get(segment.tensor):
                    found.update(_holding(stretches, segment))
                written.setdefault(segment.tensor, []).append((segment.start, part.index))
            if found:
                needed[part.index] = found.union(*[needed[index] for index in found if index in needed])
        for stretches in written.values():
            stretches.sort()
        before |= written
    return needed


def writing_order(part: Part) -> tuple[Tier, bool]:
    """Differences are added to what all tiers of their base have written."""
    return part.tier, part.has_delta


def _holding(stretches: Sequence[tuple[int, int]], segment: Segment) -> Iterable[int]:
    """The parts that hold some of the segment's elements; the stretches cover the tensor, in order."""
    first = bisect_right(stretches, (segment.start, sys.maxsize)) - 1
    last = bisect_left(stretches, (segment.start + segment.count, -1))
    return [index for _, index in stretches[max(first, 0) : last]]


def _direct_offset(manifest: Manifest, part: Part) -> int | None:
    """The offset in its slab where the part belongs as it is: no digest, only whole raw planes, all
    of them in line.
    """
    if part.digest is not None or not part.segments:
        return None
    begin: int | None = None
    covered_bytes = 0
    for segment in part.segments:
        tensor = manifest.tensors[segment.tensor]
        if not tensor.encoding.is_whole or len(segment.planes) != 1:
            return None
        plane = segment.planes[0]
        offset = tensor.offset_bytes + segment.start * tensor.element_bytes - plane.offset_bytes
        begin = offset if begin is None else begin
        if plane.codec is not Codec.RAW or plane.offset_bytes != covered_bytes or offset != begin:
            return None
        covered_bytes += plane.size_bytes
    return begin if covered_bytes == part.size_bytes else None


class RowParts:
    """The parts of one tensor, in all tiers. Takes every name, aliases included; raises `KeyError`
    for others.
    """

    def __init__(self, manifest: Manifest, name: str) -> None:
        tensor = manifest.by_name[name]
        # Of packed dtypes an element is a byte, so a row has fewer of them than numbers.
        self._row_elements = max(1, tensor.num_elements // max(1, tensor.shape[0] if tensor.shape else 1))
        # Of each, and of differences apart: first elements, in order, and parts.
        self._tiers: list[tuple[list[int], list[int]]] = []
        for tier, is_delta in ((tier, is_delta) for tier in Tier for is_delta in (False, True)):
            stretches = sorted(
                (segment.start, part.index)
                for part in manifest.parts_of(tensor.group, tier)
                for segment in part.segments
                if segment.tensor == tensor.index and segment.is_delta is is_delta
            )
            if stretches:
                self._tiers.append(([start for start, _ in stretches], [number for _, number in stretches]))

    @property
    def all(self) -> frozenset[int]:
        """The numbers of all parts that hold some of the tensor."""
        return frozenset(number for _, numbers in self._tiers for number in numbers)

    def runs(self, most: int) -> list[list[int]]:
        """The rows in which parts begin, ascending, in at most `most` runs. From one such row to the next, rows need
        no part that the first one does not.
        """
        begins = sorted({start // self._row_elements for starts, _ in self._tiers for start in starts})
        size = max(1, -(-len(begins) // most))
        return [begins[at : at + size] for at in range(0, len(begins), size)]

    def holding(self, rows: Iterable[int]) -> set[int]:
        """The numbers of the parts that hold these rows; each row must be one that the tensor has."""
        found: set[int] = set()
        width = self._row_elements
        for row in set(rows):
            for starts, numbers in self._tiers:
                first = bisect_right(starts, row * width) - 1
                last = bisect_right(starts, row * width + width - 1)
                found.update(numbers[first:last])
        return found


class _Awaited:
    """Bytes that a caller waits for: `total_bytes`, until none of it is unread."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._unread_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Positive: bytes that must be read, too. Negative: bytes that are being read now."""
        self._unread_bytes += size_bytes
        self.total_bytes = self.total_bytes + max(0, size_bytes) if self._unread_bytes else 0


class FetchOrder:
    """The steps of a plan that no range has been requested for, in order; and the rank of all others.

    A step is *taken* when its first range is requested.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = plan.steps
        self._upcoming = deque(range(len(plan.steps)))
        self._sooner: deque[int] = deque()
        # The rank of taken steps, by number. Steps without bytes need not be read.
        self._ranks: dict[int, int] = {
            number: rank
            for rank, number in enumerate(step.number for step in plan.steps if not step.part.size_bytes)
        }
        self._promoted: set[int] = set()  # taken steps that were promoted
        self._unread_bytes = [0] * len(Tier)  # by tier, not requested yet
        for step in plan.steps:
            self._unread_bytes[step.part.tier] += step.part.size_bytes
        tiers = [step.part.tier for step in plan.steps]
        self._ends_by_tier = tiers == sorted(tiers)
        self._wanted = _Awaited()  # promoted steps
        self._first = _Awaited()  # the first group
        self._num_first = 0
        for step in plan.steps:
            if step.part.group != plan.steps[0].part.group:
                break
            self._num_first += 1
            self._first.add(step.part.size_bytes)

    def __getitem__(self, number: int) -> int:
        """The rank of a taken step, counted from 0. Raises `KeyError` for others."""
        return self._ranks[number]

    @property
    def awaited_bytes(self) -> int | None:
        """The bytes of promoted steps, else of the first group; None where all of them are being
        read.
        """
        return self._wanted.total_bytes or self._first.total_bytes or None

    @property
    def unread_bytes(self) -> int:
        """The bytes of all steps that are not being read."""
        return sum(self._unread_bytes)

    def bytes_to_end(self, number: int) -> int:
        """Of these, the bytes up to the end of the step's tier, where all of a tier comes before the next one; else
        all of them.
        """
        tier = self._steps[number].part.tier
        return sum(self._unread_bytes[: tier + 1]) if self._ends_by_tier else self.unread_bytes

    def next_run(self, most_bytes: int) -> list[int]:
        """The next step, and those behind it that one range of `most_bytes` can read with it; empty
        at the end.
        """
        queue = self._next_queue()
        if not queue:
            return []
        run = [queue[0]]
        begin = self._steps[queue[0]].part.offset_bytes
        for number in islice(queue, 1, MAX_RUN_STEPS):
            part = self._steps[number].part
            if number in self._ranks or part.offset_bytes + part.size_bytes - begin > most_bytes:
                break
            if not follows(self._steps[run[-1]], self._steps[number]):
                break
            run.append(number)
        return run

    def peek(self) -> int | None:
        """The next step; None at the end."""
        queue = self._next_queue()
        return queue[0] if queue else None

    def take(self, run: Iterable[int]) -> None:
        """Take these steps, the next ones."""
        if self._sooner:
            self._promoted.update(run)
        for number in run:
            self._ranks[number] = len(self._ranks)

    def handed_out(self, number: int, size_bytes: int) -> None:
        """`size_bytes` of a taken step are being read; negative: they must be read again."""
        self._unread_bytes[self._steps[number].part.tier] -= size_bytes
        if number in self._promoted:
            self._wanted.add(-size_bytes)
        if number < self._num_first:
            self._first.add(-size_bytes)

    @property
    def is_asked(self) -> bool:
        """True if the next step was promoted."""
        return self._next_queue() is self._sooner

    def promote(self, numbers: Iterable[int]) -> None:
        """Put these steps, and those that they need, before all others."""
        wanted = set(numbers)
        wanted.update(needed for number in list(wanted) for needed in self._steps[number].needs)
        wanted.difference_update(self._ranks, self._sooner)
        self._sooner.extend(sorted(wanted))
        self._wanted.add(sum(self._steps[number].part.size_bytes for number in wanted))

    def reorder(self, order: Order) -> None:
        """Read the steps that are not taken in another order of the plan, after promoted ones."""
        self._upcoming = deque(self._plan.numbers(order))
        self._ends_by_tier = order is not Order.EXACT

    def _next_queue(self) -> deque[int]:
        """The queue whose first step is next; empty at the end."""
        for queue in (self._sooner, self._upcoming):
            while queue and queue[0] in self._ranks:
                queue.popleft()
            if queue:
                return queue
        return self._upcoming
