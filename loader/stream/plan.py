"""In which order a load reads its parts, and in which ranges: a value made from the manifest alone.

Invariant: a step comes after every step that it needs. A refine part replaces the low bits of elements that a
draft part wrote, so it needs every draft part that holds one of these elements, however the two tiers were
cut. Pure: nothing here does I/O, waits, or knows where memory lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..format.manifest import Codec, Encoding, Manifest, Part, Tier
from .options import Order

RANGE_ALIGNMENT_BYTES = 4096  # two readers never write to the same page
MIN_RANGE_BYTES = 256 * 1024  # below this a request costs more than sharing the part gains


@dataclass(frozen=True, slots=True)
class Step:
    """One part's turn.

    `needs` are the numbers of the earlier steps that must be decoded before this one. `slab_offset_bytes` is
    where in its group's slab the part may be read as it is; None when it goes through staging because it has
    a digest to be verified or planes to be decoded.
    """

    number: int
    part: Part
    needs: tuple[int, ...]
    slab_offset_bytes: int | None


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes [start_bytes, end_bytes) of the part of step number `step`: one request to the source."""

    step: int
    start_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they are fetched, and each step's ranges under the same number."""

    steps: tuple[Step, ...]
    reads: tuple[tuple[Read, ...], ...]

    @property
    def stored_bytes(self) -> int:
        return sum(step.part.size_bytes for step in self.steps)


def plan_load(manifest: Manifest, order: Order, *, range_bytes: int, connections: int) -> Plan:
    """Put the manifest's parts in `order` and cut them into ranges of at most `range_bytes`.

    Parts of the first and the last group are cut finer, so that all `connections` share one: at the start
    nothing else is worth reading, and at the end nothing else is left.
    """
    parts = sorted(manifest.parts, key=lambda part: _rank(part, order))
    edges = {parts[0].group, parts[-1].group} if parts else set()
    steps: list[Step] = []
    reads: list[tuple[Read, ...]] = []
    drafted: dict[int, list[_Stretch]] = defaultdict(list)  # by tensor
    for number, part in enumerate(parts):
        needs = _needed_steps(part, drafted) if part.tier is Tier.REFINE else ()
        steps.append(Step(number, part, needs, _direct_offset(manifest, part)))
        finest = _shared_range_bytes(part.size_bytes, connections) if part.group in edges else range_bytes
        reads.append(tuple(_cut(number, part.size_bytes, min(range_bytes, finest))))
        if part.tier is Tier.DRAFT:
            for segment in part.segments:
                drafted[segment.tensor].append(_Stretch(segment.start, segment.start + segment.count, number))
    return Plan(tuple(steps), tuple(reads))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements [start, end) of a tensor, written by step number `step`."""

    start: int
    end: int
    step: int


def _rank(part: Part, order: Order) -> tuple[int, int, int]:
    first, second = (part.group, part.tier) if order is Order.EXACT else (part.tier, part.group)
    return first, second, part.index


def _needed_steps(part: Part, drafted: dict[int, list[_Stretch]]) -> tuple[int, ...]:
    needed = {
        stretch.step
        for segment in part.segments
        for stretch in drafted[segment.tensor]
        if stretch.start < segment.start + segment.count and segment.start < stretch.end
    }
    return tuple(sorted(needed))


def _direct_offset(manifest: Manifest, part: Part) -> int | None:
    """Where in its slab the part belongs as it is: no digest, only whole raw planes, all of them in line."""
    if part.digest is not None or not part.segments:
        return None
    begin: int | None = None
    covered_bytes = 0
    for segment in part.segments:
        tensor = manifest.tensors[segment.tensor]
        if tensor.encoding is not Encoding.WHOLE or len(segment.planes) != 1:
            return None
        plane = segment.planes[0]
        offset = tensor.offset_bytes + segment.start * tensor.element_bytes - plane.offset_bytes
        begin = offset if begin is None else begin
        if plane.codec is not Codec.RAW or plane.offset_bytes != covered_bytes or offset != begin:
            return None
        covered_bytes += plane.size_bytes
    return begin if covered_bytes == part.size_bytes else None


def _shared_range_bytes(size_bytes: int, connections: int) -> int:
    return max(MIN_RANGE_BYTES, -(-size_bytes // connections))


def _cut(step: int, size_bytes: int, range_bytes: int) -> Iterator[Read]:
    """Equal ranges of whole pages, as few as `range_bytes` allows."""
    count = max(1, -(-size_bytes // range_bytes))
    even_bytes = -(-size_bytes // count)
    if range_bytes >= RANGE_ALIGNMENT_BYTES:
        even_bytes = min(range_bytes, -(-even_bytes // RANGE_ALIGNMENT_BYTES) * RANGE_ALIGNMENT_BYTES)
    for start in range(0, size_bytes, even_bytes):
        yield Read(step, start, min(start + even_bytes, size_bytes))
