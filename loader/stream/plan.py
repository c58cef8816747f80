"""In which order a load takes its parts: a value made from the manifest alone.

Invariant: a step comes after every step that it needs. A refine part replaces the low bits of elements that a
draft part wrote, so it needs every draft part that holds one of these elements, however the two tiers were
cut. Pure: nothing here does I/O, waits, or knows where memory lies; how the parts are cut into ranges is decided
while they are read (`sizing.py`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from typing import NamedTuple

from ..format.manifest import PLANE_ALIGNMENT_BYTES, Codec, Encoding, Manifest, Part, Tier
from .options import Order

FIRST_GROUP = 0


class Step(NamedTuple):
    """One part's turn.

    `needs` are the numbers of the earlier steps that must be decoded before this one. `slab_offset_bytes` is
    where in its group's slab the part may be read as it is; None when it goes through staging because it has
    a digest to be verified or planes to be decoded.
    """

    number: int
    part: Part
    needs: tuple[int, ...]
    slab_offset_bytes: int | None


class Plan(NamedTuple):
    """Steps in the order in which they are fetched unless somebody asks for one of them sooner."""

    steps: tuple[Step, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(step.part.size_bytes for step in self.steps)


def plan_load(manifest: Manifest, order: Order, *, tables_last: bool = False) -> Plan:
    """Put the manifest's parts in `order`.

    With `tables_last`, the parts that hold nothing but tables come behind all others of the same tiers: a table is
    a matrix of the first group that several parts share. A forward pass begins with a few of its rows, which it
    asks for; where embeddings are tied to the head, the whole of it is what comes last.
    """
    late = _table_parts(manifest) if tables_last else set()
    parts = sorted(manifest.parts, key=lambda part: _rank(part, order, part.index in late))
    drafted: dict[int, list[tuple[int, int]]] = defaultdict(list)  # first element and step, by tensor
    for number, part in enumerate(parts):
        if part.tier is Tier.DRAFT:
            for segment in part.segments:
                drafted[segment.tensor].append((segment.start, number))
    for stretches in drafted.values():
        stretches.sort()
    steps = (
        Step(
            number,
            part,
            _needed_steps(part, drafted) if part.tier is Tier.REFINE else (),
            _direct_offset(manifest, part),
        )
        for number, part in enumerate(parts)
    )
    return Plan(tuple(steps))


def follows(before: Step, step: Step) -> bool:
    """Whether one range can read both parts: of one group and tier, one behind the other in their blob, and with one
    piece of memory to go to.
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


def _rank(part: Part, order: Order, is_late: bool) -> tuple[int, int, int, int]:
    if order is Order.DRAFT_FIRST:
        return part.tier, is_late, part.group, part.index
    return is_late, part.group, part.tier, part.index


def _table_parts(manifest: Manifest) -> set[int]:
    """Numbers of the draft parts that hold nothing but tables, and of the refine parts that hold some of one."""
    candidates = [part for part in manifest.parts if part.group == FIRST_GROUP]
    num_parts = Counter(
        segment.tensor for part in candidates if part.tier is Tier.DRAFT for segment in part.segments
    )
    tables = {
        tensor for tensor, num in num_parts.items() if num > 1 and len(manifest.tensors[tensor].shape) == 2
    }
    late: set[int] = set()
    for part in candidates:
        of_tables = (segment.tensor in tables for segment in part.segments)
        # A refine part may need late draft parts as soon as one segment is a table's: then it is late itself.
        if all(of_tables) if part.tier is Tier.DRAFT else any(of_tables):
            late.add(part.index)
    return late


def _needed_steps(part: Part, drafted: dict[int, list[tuple[int, int]]]) -> tuple[int, ...]:
    needed: set[int] = set()
    for segment in part.segments:
        stretches = drafted[segment.tensor]  # they cover the tensor, in order
        first = bisect_right(stretches, (segment.start, sys.maxsize)) - 1
        last = bisect_left(stretches, (segment.start + segment.count, -1))
        needed.update(number for _, number in stretches[max(first, 0) : last])
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
