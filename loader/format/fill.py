"""Planes → elements: what a verified part says about its tensors, decoded where they lie.

Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. The first tier that an encoding has makes
usable weights, their missing bits at the midpoint; a later one replaces these bits, so it needs the tiers before it
there. Each may be repeated until the next one was decoded. A device merges planes itself: it gets them one by one. It
does not know blobs, digests or whose memory it writes to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import IntegrityError
from ..native.fill import Damage, FillKind, PlaneArgs, SegmentArgs, fill
from ..native.fill import Scratch as Scratch  # noqa: PLC0414 - callers find all that filling takes here
from ..native.frames import Fault, address, damaged
from .encoding import Encoding, Tier
from .manifest import Codec, Segment, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_DENSE = -1  # for `num_values`
_WHOLE = 0  # bits of a plane that is not cut


class SegmentMemory(NamedTuple):
    """A segment of a part, and the memory of its elements: (count · element_bytes,) bytes in its slab."""

    tensor: Tensor
    segment: Segment
    out: Bytes
    base: Bytes | None = None  # of differences: the elements they are added to; None: those of `out`, once


def fill_part(stretches: Sequence[SegmentMemory], tier: Tier, stored: memoryview, scratch: Scratch) -> None:
    """Write what one part says about its segments, whose memory they name. One call, without the GIL.

    `stored` is the whole part, already verified. Raises `IntegrityError` when a plane does not
    decode to its exact size, or has bits that mean nothing; the memory is then undefined.
    """
    unaligned = [
        place for place, each in enumerate(stretches) if address(each.out) % each.tensor.element_bytes
    ]
    if unaligned:  # never in a slab
        copies = list(stretches)
        for place in unaligned:
            copies[place] = copies[place]._replace(out=copies[place].out.copy())
        fill_part(copies, tier, stored, scratch)
        for place in unaligned:
            np.copyto(stretches[place].out, copies[place].out)
        return
    segments = [_merged(each, tier) for each in stretches]
    _fill(segments, [(each.tensor, each.segment) for each in stretches], tier, stored, scratch)


def fill_planes(
    segments: Sequence[tuple[Tensor, Segment]],
    tier: Tier,
    stored: memoryview,
    outs: Sequence[Sequence[Bytes | None]],
    scratch: Scratch,
) -> None:
    """Write the planes of a part's segments into `outs` as they are before they are merged: a caller merges them
    elsewhere.

    Each of `outs` has exactly its plane's decoded size. A plane whose `out` is None is left out: one of whole bytes,
    which may have any value. Raises as `fill_part` does.
    """
    arguments = [
        _apart(tensor, segment, tier, of_planes)
        for (tensor, segment), of_planes in zip(segments, outs, strict=True)
    ]
    _fill(arguments, segments, tier, stored, scratch)


def decode_planes(
    tensor: Tensor,
    segment: Segment,
    tier: Tier,
    stored: memoryview,
    out: memoryview | Bytes,
    scratch: Scratch,
) -> None:
    """Fill a single segment without a base: see `fill_part`."""
    fill_part([SegmentMemory(tensor, segment, np.frombuffer(out, np.uint8), None)], tier, stored, scratch)


class _Recipe(NamedTuple):
    """How one tier of an encoding becomes elements of this size. `bits` are its planes', masks and signs included."""

    kind: FillKind
    bits: tuple[int, ...]
    numbers: tuple[int, bool, bool, int, int, int]  # the last six of `SegmentArgs`


@functools.cache  # of some hundred encodings, two or three tiers each
def _recipe_for(encoding: Encoding, tier: Tier, element_bytes: int, is_delta: bool) -> _Recipe:
    if is_delta or encoding is Encoding.DELTA:
        return _Recipe(FillKind.DIFFERENCES, (8,) * element_bytes, (element_bytes, True, True, 0, 0, 0))
    if encoding.is_whole:
        return _Recipe(FillKind.WHOLE, (_WHOLE,), (element_bytes, True, True, 0, 0, 0))
    bits = encoding.plane_bits(tier, element_bytes)
    is_first, is_last = tier is encoding.tiers[0], tier is encoding.tiers[-1]
    float_format = encoding.float_format
    if encoding.is_sparse and is_first:
        bits = (1, *bits) if float_format is None else (1, 1, *bits)
    if float_format is None:
        return _Recipe(FillKind.BYTES, bits, (element_bytes, is_first, is_last, 0, 0, 0))
    mantissa = float_format.mantissa_bits, encoding.mantissa_bits(tier)
    return _Recipe(
        FillKind.FLOATS, bits, (element_bytes, is_first, is_last, float_format.exponent_bits, *mantissa)
    )


def _merged(stretch: SegmentMemory, tier: Tier) -> SegmentArgs:
    tensor, segment, out, base = stretch
    recipe = _recipe_for(tensor.encoding, tier, tensor.element_bytes, segment.is_delta)
    planes = [
        PlaneArgs(plane.offset_bytes, plane.size_bytes, 0, bits, plane.codec is Codec.ZSTD)
        for plane, bits in zip(segment.planes, recipe.bits, strict=True)
    ]
    assert out.size == segment.count * tensor.element_bytes
    num_values = _DENSE if segment.values is None else segment.values
    return SegmentArgs(
        address(out),
        0 if base is None else address(base),
        planes,
        segment.count,
        num_values,
        recipe.kind,
        *recipe.numbers,
    )


def _apart(tensor: Tensor, segment: Segment, tier: Tier, outs: Sequence[Bytes | None]) -> SegmentArgs:
    recipe = _recipe_for(tensor.encoding, tier, tensor.element_bytes, False)
    assert segment.values is None  # sparse planes are not of elements
    planes = [
        PlaneArgs(
            plane.offset_bytes,
            plane.size_bytes,
            0 if out is None else address(out),
            bits,
            plane.codec is Codec.ZSTD,
        )
        for plane, bits, out in zip(segment.planes, recipe.bits, outs, strict=True)
    ]
    return SegmentArgs(0, 0, planes, segment.count, _DENSE, FillKind.PLANES, *recipe.numbers)


def _fill(
    arguments: list[SegmentArgs],
    segments: Sequence[tuple[Tensor, Segment]],
    tier: Tier,
    stored: memoryview,
    scratch: Scratch,
) -> None:
    damage = fill(np.frombuffer(stored, np.uint8), arguments, scratch)
    if damage is not None:
        raise _error(damage, *segments[damage.segment], tier, len(stored))


def _error(damage: Damage, tensor: Tensor, segment: Segment, tier: Tier, stored_bytes: int) -> IntegrityError:
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    fault, _, number, at = damage
    # A sparse first tier has its mask, and of floats its signs, before the planes of values.
    is_front = segment.values is not None and number < len(segment.planes) - len(
        tensor.encoding.plane_bits(tier, tensor.element_bytes)
    )
    if fault is Fault.RAW_SIZE:
        plane = segment.planes[number]
        held_bytes = max(0, min(plane.size_bytes, stored_bytes - plane.offset_bytes))
        held = f"{plane.codec.value} plane of {held_bytes}"
        message = f"a raw plane of {at} bytes was expected, but the part holds a {held}"
    elif fault is Fault.UNUSED_BITS:
        behind = ("mask", "signs")[number] if is_front else "elements"
        message = f"the unused bits behind the last of its {behind} are not 0"
    elif fault is Fault.EXPONENT_BITS:
        assert tensor.encoding.float_format is not None
        message = f"an exponent has more than {tensor.encoding.float_format.exponent_bits} bits"
    elif fault in (Fault.MASK_COUNT, Fault.TIER_COUNT):
        found = "the mask has" if fault is Fault.MASK_COUNT else "the tiers before have"
        message = f"{found} another number of values than {segment.values}"
    elif fault is Fault.ZERO_VALUE:
        message = "a value is a zero, where the mask says that it is not"
    else:
        return damaged(fault, at, where)
    return IntegrityError(f"{where}: {message}", where=where)
