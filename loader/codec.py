"""Elements ↔ planes: how a stretch of a tensor is cut into byte streams that compress well and arrive in tiers.

Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. Works a frame of `FRAME_ELEMENTS` elements at a
time, so that what is decompressed is merged while it is still in the second-level cache. Every heavy call releases the GIL.
It does not know parts, blobs, digests or where memory comes from.

bf16.3 cuts a bf16 `s eeeeeeee mmmmmmm` into E = the exponent byte, N1 = `s` and the top 3 mantissa bits, N2 = the low 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from . import zstd
from .errors import IntegrityError
from .manifest import DTYPE_BITS, FRAME_ELEMENTS, Codec, Encoding, Plane, Segment, Tensor, Tier, frame_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint16]
    CodedPlane = tuple[Codec, bytes | memoryview]

MIN_PLANE_GAIN = 0.03  # below it a plane is stored raw: decoding would cost more than the bytes saved
MIN_BF16_SPLIT_ELEMENTS = 1024  # smaller tensors are not worth a frame's overhead
MAX_SAMPLE_FRAMES = 4

_WORD = np.dtype("<u2")
_EXPONENT_SHIFT = np.uint16(7)
_DRAFT_MASK = np.uint16(0x8070)  # sign and top 3 mantissa bits, where they stand in a bf16
_REFINE_CLEAR = np.uint16(0xFFF0)
_MIDPOINT_FILL = np.uint16(0b1000)  # what the 4 missing mantissa bits are worth on average


class Scratch:
    """Working memory of one decoding thread: about 450 KiB, reused from frame to frame. Not to be shared."""

    __slots__ = ("half", "nibbles", "words")

    def __init__(self) -> None:
        self.words: Words = np.empty(FRAME_ELEMENTS, _WORD)
        self.half: Words = np.empty(FRAME_ELEMENTS // 2, _WORD)
        self.nibbles: Bytes = np.empty(FRAME_ELEMENTS // 2, np.uint8)


def choose_encoding(dtype: str, shape: tuple[int, ...]) -> Encoding:
    """How a tensor is best stored. Vectors stay whole: they are small, and the draft needs them exact."""
    if len(shape) < 2:
        return Encoding.WHOLE
    if dtype == "BF16":
        large = math.prod(shape) >= MIN_BF16_SPLIT_ELEMENTS
        return Encoding.BF16_3 if large else Encoding.WHOLE
    return Encoding.BYTES


def elements_per_plane_byte(encoding: Encoding, tier: Tier, element_bytes: int) -> tuple[int, ...]:
    """For each coded plane of a tier, how many elements share one of its bytes. Whole planes are not coded."""
    if encoding is Encoding.BF16_3:
        return (1, 2) if tier is Tier.DRAFT else (2,)
    return (1,) * element_bytes if tier is Tier.DRAFT else ()


def plane_count(encoding: Encoding, tier: Tier, element_bytes: int) -> int:
    """How many planes a segment has in a tier."""
    return len(decoded_plane_bytes(encoding, tier, element_bytes, 1))


def decoded_plane_bytes(encoding: Encoding, tier: Tier, element_bytes: int, count: int) -> tuple[int, ...]:
    """The size of each plane of `count` elements before coding: what a raw plane takes, exactly."""
    if encoding is Encoding.WHOLE:
        return (count * element_bytes,) if tier is Tier.DRAFT else ()
    # FRAME_ELEMENTS is even, so only the last frame can round up.
    return tuple(-(-count // share) for share in elements_per_plane_byte(encoding, tier, element_bytes))


def encode_segment(dtype: str, encoding: Encoding, data: Bytes) -> dict[Tier, list[CodedPlane]]:
    """A segment's bytes as the planes of each tier, in the format's order. Planes may be views of `data`.

    `data` is contiguous uint8. Takes about twice its size in memory besides.
    """
    if encoding is Encoding.WHOLE:
        return {Tier.DRAFT: [(Codec.RAW, data.data)]}
    if encoding is Encoding.BYTES:
        element_bytes = max(1, DTYPE_BITS[dtype] // 8)
        columns = data.reshape(-1, element_bytes)
        planes = (np.ascontiguousarray(columns[:, place]) for place in range(element_bytes))
        return {Tier.DRAFT: [_code_plane(plane, FRAME_ELEMENTS) for plane in planes]}
    exponents, draft_nibbles, refine_nibbles = _split_bf16(data.view(_WORD))
    return {
        Tier.DRAFT: [
            _code_plane(exponents, FRAME_ELEMENTS),
            _code_plane(draft_nibbles, FRAME_ELEMENTS // 2),
        ],
        Tier.REFINE: [_code_plane(refine_nibbles, FRAME_ELEMENTS // 2)],
    }


def decode_planes(
    tensor: Tensor, segment: Segment, tier: Tier, stored: memoryview, out: Bytes, scratch: Scratch
) -> None:
    """Write what one tier says about a segment into `out`, the segment's own bytes in the slab.

    `stored` is the whole verified part. The draft of bf16.3 is a usable weight, its 4 missing bits filled with their
    midpoint; the refine tier replaces those 4 bits, needs the draft to be there, and may be repeated. Raises
    `IntegrityError` when a plane does not decode to its exact size; `out` is then undefined.
    """
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    if tensor.encoding is Encoding.WHOLE:
        np.copyto(out, _raw_plane(stored, segment.planes[0], out.size, where))
        return
    counts = frame_counts(segment.count)
    shares = elements_per_plane_byte(tensor.encoding, tier, tensor.element_bytes)
    planes = [
        _plane_frames(stored, plane, segment.count, share, where)
        for plane, share in zip(segment.planes, shares, strict=True)
    ]
    if tensor.encoding is Encoding.BYTES:
        _merge_bytes(out, counts, planes)
    elif tier is Tier.DRAFT:
        _merge_draft(out.view(_WORD), counts, *planes, scratch=scratch, where=where)
    else:
        _merge_refine(out.view(_WORD), counts, *planes, scratch=scratch, where=where)


def _merge_bytes(out: Bytes, counts: list[int], planes: list[Iterator[Bytes]]) -> None:
    columns = out.reshape(-1, len(planes))
    start = 0
    for count, *frames in zip(counts, *planes, strict=True):
        for place, frame in enumerate(frames):
            np.copyto(columns[start : start + count, place], frame)
        start += count


def _merge_draft(
    out: Words,
    counts: list[int],
    exponent_frames: Iterator[Bytes],
    nibble_frames: Iterator[Bytes],
    *,
    scratch: Scratch,
    where: str,
) -> None:
    start = 0
    for count, exponents, packed in zip(counts, exponent_frames, nibble_frames, strict=True):
        _check_last_nibble(count, packed, where)
        low_count = packed.size
        bits = scratch.words[:count]
        widened = scratch.half[:low_count]
        # One multiplication puts a nibble's sign and mantissa bits in place at once: there is no overlap, so no carry.
        np.copyto(widened, packed)
        np.multiply(widened, np.uint16(0x1010), out=bits[:low_count])
        np.multiply(widened[: count - low_count], np.uint16(0x0101), out=bits[low_count:])
        np.bitwise_and(bits, _DRAFT_MASK, out=bits)
        np.bitwise_or(bits, _MIDPOINT_FILL, out=bits)
        words = out[start : start + count]
        np.copyto(words, exponents)
        np.multiply(words, np.uint16(1 << 7), out=words)  # multiplies vectorise better than shifts
        np.bitwise_or(words, bits, out=words)
        start += count


def _merge_refine(
    out: Words, counts: list[int], nibble_frames: Iterator[Bytes], *, scratch: Scratch, where: str
) -> None:
    start = 0
    for count, packed in zip(counts, nibble_frames, strict=True):
        _check_last_nibble(count, packed, where)
        low_count = packed.size
        bits = scratch.words[:count]
        nibbles = scratch.nibbles[:low_count]
        np.bitwise_and(packed, np.uint8(0x0F), out=nibbles)
        np.copyto(bits[:low_count], nibbles)
        np.right_shift(packed, np.uint8(4), out=nibbles)
        np.copyto(bits[low_count:], nibbles[: count - low_count])
        words = out[start : start + count]
        # Assigned under a mask, never XORed: a part that is decoded twice must give the same weights.
        np.bitwise_and(words, _REFINE_CLEAR, out=words)
        np.bitwise_or(words, bits, out=words)
        start += count


def _check_last_nibble(count: int, packed: Bytes, where: str) -> None:
    if count % 2 and packed[-1] >> 4:
        raise IntegrityError(f"{where}: the unused last nibble is not 0", where=where)


def _plane_frames(stored: memoryview, plane: Plane, count: int, share: int, where: str) -> Iterator[Bytes]:
    """The plane's decoded bytes, frame by frame. Views of `stored` where the plane is raw."""
    total_bytes, frame_bytes = -(-count // share), FRAME_ELEMENTS // share
    if plane.codec is Codec.ZSTD:
        src = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
        yield from zstd.decompressed_frames(src, total_bytes, frame_bytes, where=where)
        return
    raw = _raw_plane(stored, plane, total_bytes, where)
    for start in range(0, total_bytes, frame_bytes):
        yield raw[start : start + frame_bytes]


def _raw_plane(stored: memoryview, plane: Plane, size_bytes: int, where: str) -> Bytes:
    view = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
    if plane.codec is not Codec.RAW or len(view) != size_bytes:
        raise IntegrityError(f"{where}: a raw plane of {size_bytes} bytes has {len(view)}", where=where)
    return np.frombuffer(view, np.uint8)


def _split_bf16(words: Words) -> tuple[Bytes, Bytes, Bytes]:
    """E, N1 and N2 of bf16 bit patterns: uint8 arrays of n, ceil(n/2) and ceil(n/2) bytes."""
    count_total = words.size
    exponents = np.empty(count_total, np.uint8)
    draft = np.empty(-(-count_total // 2), np.uint8)
    refine = np.empty(-(-count_total // 2), np.uint8)
    bits = np.empty(FRAME_ELEMENTS, _WORD)
    start = 0
    for count in frame_counts(count_total):
        frame = words[start : start + count]
        low_count = -(-count // 2)
        low, high = frame[:low_count], frame[low_count:]
        place = slice(start // 2, start // 2 + low_count)
        np.right_shift(frame, _EXPONENT_SHIFT, out=bits[:count])
        np.copyto(exponents[start : start + count], bits[:count], casting="unsafe")
        _pack_draft_nibbles(low, high, bits, out=draft[place])
        _pack_refine_nibbles(low, high, bits, out=refine[place])
        start += count
    return exponents, draft, refine


def _pack_draft_nibbles(low: Words, high: Words, scratch: Words, *, out: Bytes) -> None:
    both, other = scratch[: low.size], scratch[FRAME_ELEMENTS // 2 :][: low.size]
    np.bitwise_and(low, _DRAFT_MASK, out=both)
    np.right_shift(both, np.uint16(4), out=both)
    np.bitwise_and(high, _DRAFT_MASK, out=other[: high.size])
    np.bitwise_or(both[: high.size], other[: high.size], out=both[: high.size])
    # Now bits 0–2 and 11 are the low element's, 4–6 and 15 the high one's: fold the two signs down by 8.
    np.right_shift(both, np.uint16(8), out=other)
    np.bitwise_or(both, other, out=both)
    np.copyto(out, both, casting="unsafe")


def _pack_refine_nibbles(low: Words, high: Words, scratch: Words, *, out: Bytes) -> None:
    both, other = scratch[: low.size], scratch[FRAME_ELEMENTS // 2 :][: high.size]
    np.bitwise_and(low, np.uint16(0x0F), out=both)
    np.left_shift(high, np.uint16(4), out=other)
    np.bitwise_or(both[: high.size], other, out=both[: high.size])
    np.copyto(out, both, casting="unsafe")


def _code_plane(plane: Bytes, frame_bytes: int) -> CodedPlane:
    """The plane raw, or as zstd frames where a sample of them, and then the whole, says that it pays."""
    raw = Codec.RAW, plane.data
    limit = 1 - MIN_PLANE_GAIN
    sample = _sample(plane, frame_bytes)
    huf_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=True))
    level_1_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=False))
    if min(huf_bytes, level_1_bytes) > limit * sample.size:
        return raw
    # Matches decode at a third of the speed of literals: they must earn it.
    coded = zstd.compress_frames(plane.data, frame_bytes, huf=level_1_bytes > 0.9 * huf_bytes)
    return (Codec.ZSTD, coded) if len(coded) <= limit * plane.size else raw


def _sample(plane: Bytes, frame_bytes: int) -> Bytes:
    """A few whole frames, evenly spread; the plane itself when it is small."""
    num_frames = -(-plane.size // frame_bytes)
    num_samples = min(MAX_SAMPLE_FRAMES, -(-num_frames // 8))
    if num_samples == num_frames:
        return plane
    starts = [index * num_frames // num_samples * frame_bytes for index in range(num_samples)]
    return np.concatenate([plane[start : start + frame_bytes] for start in starts])
