"""The order in which a load takes its parts, and the policy for its tiers: values made from the
manifest.

Invariant: a step comes after every step that it needs. A part of a later tier replaces the low bits
of elements that parts of the tier before it wrote, so it needs each of those that holds one of
these elements, however the two tiers were cut, and what these need in turn. Pure: nothing here does
I/O, waits, or knows where memory lies; how the parts are cut into ranges is decided while they are
read (`link.py`).

The policy decides which tier comes first. All of the draft first means that a usable model is there
early, and that the exact one is complete no later than it would be group by group: the bytes are
the same. What is gained meanwhile is tokens that the draft makes: sent where a client allowed it,
else as proposals that the exact weights confirm in one pass when they are complete. Nothing is
gained when there is no time for them, on a fast link or with a small model, and the passes over the
draft would only take cores from the load.

A forward pass needs few rows of its largest matrix, the embeddings: `RowParts` finds the parts that
hold them. Of a mixture it needs those experts that its tokens choose.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..format.layout import is_expert
from ..format.manifest import PLANE_ALIGNMENT_BYTES, Codec, Manifest, Part, Segment, Tier
from .options import Order

FIRST_GROUP = 0


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


MIN_PROPOSALS = 4  # fewer are not worth the pass over the draft that they begin with
NO_REFINE_TIER = "there is no refine tier, or nothing left of it"
MIN_GAIN_S = 0.15  # before the exact first token, for a draft that is sent

# Of the exact weights, whose products a token needs, by one core or several. An assumption for the
# first moments: engines measure it later. Draft steps of the 0.5B shape, while refining bytes
# arrived at 100 and 200 MB/s and were decoded on the same 2 cores, took 39 and 46 ms for 988 MB
# (docs/draft.md: 16th token less first one).
WEIGHT_BYTES_PER_S = 20e9


class Sizes(NamedTuple):
    """Stored bytes that have not arrived, and what the weights take in memory."""

    early_bytes: int  # of all tiers but the last
    refine_bytes: int
    weight_bytes: int


class Prediction(NamedTuple):
    """Times in seconds since the load began."""

    order: Order
    rate_bytes_per_s: float
    draft_s: float  # when the draft is complete
    exact_s: float  # when all is
    token_s: float  # what one token takes
    num_proposals: int  # that the draft can make in between
    why: str


def predict(
    sizes: Sizes,
    rate_bytes_per_s: float,
    *,
    elapsed_s: float,
    ready_s: float,
    sends_drafts: bool,
    decoding_limits: bool = False,
) -> Prediction:
    """Decide for a load that has run for `elapsed_s`, on a link that gives it this rate (> 0).

    `ready_s` is when the model will be able to compute, since the load began: libraries are
    imported until then. `sends_drafts` says that clients get tokens of the draft, and not only what
    exact weights confirmed; `decoding_limits`, that bytes come faster than they are decoded, so
    that computing with the draft would take the cores that the exact weights need.
    """
    token_s = sizes.weight_bytes / WEIGHT_BYTES_PER_S
    draft_s = elapsed_s + sizes.early_bytes / rate_bytes_per_s
    exact_s = draft_s + sizes.refine_bytes / rate_bytes_per_s
    # One token's time for the pass over the prompt that the draft needs, and one for the pass that
    # confirms.
    window_s = exact_s - max(draft_s, ready_s) - 2 * token_s
    num_proposals = max(0, int(window_s / token_s)) if token_s else 0
    gain_s = max(exact_s, ready_s) - max(draft_s, ready_s)
    if not sizes.refine_bytes:
        order, why = Order.EXACT, NO_REFINE_TIER
    elif sends_drafts and gain_s >= MIN_GAIN_S:
        order, why = Order.DRAFT_FIRST, f"the draft answers {gain_s:.2f} s sooner"
    elif decoding_limits:
        order, why = Order.EXACT, "decoding takes longer than the bytes, and a draft would take its cores"
    elif num_proposals >= MIN_PROPOSALS:
        order, why = Order.DRAFT_FIRST, f"time for {num_proposals} proposals"
    else:
        order, why = Order.EXACT, "the exact weights come too soon after the draft to gain anything"
    return Prediction(order, rate_bytes_per_s, draft_s, exact_s, token_s, num_proposals, why)
