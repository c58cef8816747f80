"""Elements ↔ planes: how a stretch of a tensor is cut into byte streams that compress, and come in tiers.

Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. Decodes in batches of a few frames
(`FRAME_ELEMENTS` elements each): what is decompressed is merged while it is still in the cache, and calls are
few, since each one gives the GIL up and has to get it back. It does not know parts, blobs, digests or whose
memory it writes to.

bf16.3 cuts a bf16 `s eeeeeeee mmmmmmm` into E, the exponent byte; N1, `s` and the top 3 mantissa bits; and
N2, the low 4. `share` below is the number of elements that share one byte of a plane (`plane_shares`): 2 for nibbles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import IntegrityError
from . import zstd
from .manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    Codec,
    Encoding,
    Plane,
    Segment,
    Tensor,
    Tier,
    frame_counts,
    plane_shares,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint16]
    CodedPlane = tuple[Codec, bytes | memoryview]

MIN_PLANE_GAIN = 0.03  # below it a plane stays raw: decoding would cost more than the bytes that it saves
MIN_SPLIT_ELEMENTS = 1024  # smaller bf16 matrices stay whole

_WORD = np.dtype("<u2")
_SIGN_AND_TOP_BITS = np.uint16(0x8070)  # of a bf16: what N1 holds
_LOW_BITS = np.uint16(0x000F)  # what N2 holds
_MIDPOINT = np.uint16(0b1000)  # what the low bits are worth on average, while only the draft is there
_MAX_BATCH_FRAMES = 8  # more of them gain little, and leave the cache; elements of 8 bytes need 8
_MAX_SAMPLE_FRAMES = 4
_LEVEL_1_MIN_GAIN = 0.1  # over literals only; frames with matches decode at a third of the speed


class Scratch:
    """Working memory of one thread, 1.75 MiB, used again for every batch. Not to be shared."""

    __slots__ = ("planes", "words")

    def __init__(self) -> None:
        elements = _MAX_BATCH_FRAMES * FRAME_ELEMENTS
        self.planes: Bytes = np.empty(elements * 3 // 2, np.uint8)  # decompressed; bf16.3's draft fills it
        self.words: Words = np.empty(elements, _WORD)


def choose_encoding(dtype: str, shape: tuple[int, ...]) -> Encoding:
    """How a tensor is best stored. Vectors stay whole: they are small, and a draft model needs them exact."""
    if len(shape) < 2:
        return Encoding.WHOLE
    if dtype == "BF16":
        return Encoding.BF16_3 if math.prod(shape) >= MIN_SPLIT_ELEMENTS else Encoding.WHOLE
    return Encoding.BYTES


# Elements → planes


def encode_segment(dtype: str, encoding: Encoding, data: Bytes) -> dict[Tier, list[CodedPlane]]:
    """The planes of each tier, in the format's order. Some may be views of `data`: keep it as long as them.

    `data` is the segment's bytes, contiguous. Takes up to twice their size in memory besides.
    """
    if encoding is Encoding.WHOLE:
        return {Tier.DRAFT: [(Codec.RAW, data.data)]}
    if encoding is Encoding.BYTES:
        element_bytes = max(1, DTYPE_BITS[dtype] // 8)
        columns = data.reshape(-1, element_bytes)
        planes = (np.ascontiguousarray(columns[:, place]) for place in range(element_bytes))
        return {Tier.DRAFT: [_code_plane(plane, share=1) for plane in planes]}
    exponents, top_nibbles, low_nibbles = _split_bf16(data.view(_WORD))
    return {
        Tier.DRAFT: [_code_plane(exponents, share=1), _code_plane(top_nibbles, share=2)],
        Tier.REFINE: [_code_plane(low_nibbles, share=2)],
    }


def _code_plane(plane: Bytes, *, share: int) -> CodedPlane:
    """The plane as zstd frames where a sample of it, and then the whole, says that it pays; else as it is."""
    frame_bytes = FRAME_ELEMENTS // share
    sample = _sample(plane, frame_bytes)
    huf_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=True))
    level_1_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=False))
    if min(huf_bytes, level_1_bytes) <= (1 - MIN_PLANE_GAIN) * sample.size:
        huf = level_1_bytes > (1 - _LEVEL_1_MIN_GAIN) * huf_bytes
        coded = zstd.compress_frames(plane.data, frame_bytes, huf=huf)
        if len(coded) <= (1 - MIN_PLANE_GAIN) * plane.size:
            return Codec.ZSTD, coded
    return Codec.RAW, plane.data


def _sample(plane: Bytes, frame_bytes: int) -> Bytes:
    """A few whole frames from all over the plane; the plane itself when it has only one."""
    num_frames = -(-plane.size // frame_bytes)
    num_samples = min(_MAX_SAMPLE_FRAMES, -(-num_frames // 8))
    starts = [index * num_frames // num_samples * frame_bytes for index in range(num_samples)]
    return np.concatenate([plane[start : start + frame_bytes] for start in starts])


def _split_bf16(words: Words) -> tuple[Bytes, Bytes, Bytes]:
    """E, N1 and N2 of n bf16 bit patterns: n, ceil(n/2) and ceil(n/2) bytes."""
    exponents = np.empty(words.size, np.uint8)
    top_nibbles = np.empty(-(-words.size // 2), np.uint8)
    low_nibbles = np.empty(-(-words.size // 2), np.uint8)
    scratch = np.empty(FRAME_ELEMENTS, _WORD)
    start = 0
    for count in frame_counts(words.size):
        frame = words[start : start + count]
        np.right_shift(frame, np.uint16(7), out=scratch[:count])
        np.copyto(exponents[start : start + count], scratch[:count], casting="unsafe")
        half = -(-count // 2)
        low, high = frame[:half], frame[half:]
        place = slice(start // 2, start // 2 + half)
        _pack_top_nibbles(low, high, scratch, out=top_nibbles[place])
        _pack_low_nibbles(low, high, scratch, out=low_nibbles[place])
        start += count
    return exponents, top_nibbles, low_nibbles


def _pack_top_nibbles(low: Words, high: Words, scratch: Words, *, out: Bytes) -> None:
    """N1 of one frame; `low` are the elements of the low nibbles, and may be one more than `high`."""
    packed, other = scratch[: low.size], scratch[low.size : 2 * low.size]
    np.bitwise_and(low, _SIGN_AND_TOP_BITS, out=packed)
    np.right_shift(packed, np.uint16(4), out=packed)
    np.bitwise_and(high, _SIGN_AND_TOP_BITS, out=other[: high.size])
    np.bitwise_or(packed[: high.size], other[: high.size], out=packed[: high.size])
    # Bits 0–2 and 11 are the low element's now, 4–6 and 15 the high one's: move both signs down by 8.
    np.right_shift(packed, np.uint16(8), out=other)
    np.bitwise_or(packed, other, out=packed)
    np.copyto(out, packed, casting="unsafe")


def _pack_low_nibbles(low: Words, high: Words, scratch: Words, *, out: Bytes) -> None:
    """N2 of one frame."""
    packed, other = scratch[: low.size], scratch[low.size : low.size + high.size]
    np.bitwise_and(low, _LOW_BITS, out=packed)
    np.left_shift(high, np.uint16(4), out=other)
    np.bitwise_or(packed[: high.size], other, out=packed[: high.size])
    np.copyto(out, packed, casting="unsafe")  # drops all but the low byte


# Planes → elements


def decode_planes(
    tensor: Tensor,
    segment: Segment,
    tier: Tier,
    stored: memoryview,
    out: memoryview | Bytes,
    scratch: Scratch,
) -> None:
    """Write what one tier says about a segment into `out`, the segment's own bytes in the slab.

    `stored` is its whole part, already verified. The draft of bf16.3 makes usable weights, their 4 missing
    bits at the midpoint; the refine tier replaces these bits, so it needs the draft there, and may be
    repeated. Raises `IntegrityError` when a plane does not decode to its exact size; `out` is then undefined.
    """
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    elements = np.frombuffer(out, np.uint8)
    if tensor.encoding is Encoding.WHOLE:
        np.copyto(elements, _raw_plane(stored, segment.planes[0], elements.size, where))
        return
    shares = plane_shares(tensor.encoding, tier, tensor.element_bytes)
    max_frames = _MAX_BATCH_FRAMES // max(1, shares.count(1))
    counts = _batch_counts(segment.count, max_frames)
    rooms = _cut(scratch.planes, [max_frames * FRAME_ELEMENTS // share for share in shares])
    planes = [
        _plane_pieces(stored, plane, counts, share, room, where)
        for plane, share, room in zip(segment.planes, shares, rooms, strict=True)
    ]
    merge = _merge_for(tensor, tier)
    begin = 0
    for count, *pieces in zip(counts, *planes, strict=True):  # strictly, so that planes check their own end
        _check_unused_nibbles(count, pieces, shares, where)
        end = begin + count * tensor.element_bytes
        merge(elements[begin:end], pieces, scratch)
        begin = end


def _batch_counts(count: int, max_frames: int) -> list[int]:
    """How many elements to decode at a time: up to `max_frames` whole frames; at last what is left of one."""
    num_whole, rest = divmod(count, FRAME_ELEMENTS)
    num_full, frames = divmod(num_whole, max_frames)
    counts = [max_frames * FRAME_ELEMENTS] * num_full + [frames * FRAME_ELEMENTS, rest]
    return [count for count in counts if count]


def _plane_pieces(
    stored: memoryview, plane: Plane, counts: list[int], share: int, room: Bytes, where: str
) -> Iterator[Bytes]:
    """The plane's bytes of each batch: views of `stored` where it is raw, else of `room`, again and again."""
    sizes_bytes = [-(-count // share) for count in counts]
    if plane.codec is Codec.ZSTD:
        src = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
        frames = zstd.FrameReader(src, FRAME_ELEMENTS // share, where=where)
        for size_bytes in sizes_bytes:
            frames.read_into(room[:size_bytes])
            yield room[:size_bytes]
        frames.finish()
        return
    yield from _cut(_raw_plane(stored, plane, sum(sizes_bytes), where), sizes_bytes)


def _cut(data: Bytes, sizes_bytes: list[int]) -> Iterator[Bytes]:
    """Views of these sizes, one behind another."""
    begin = 0
    for size_bytes in sizes_bytes:
        yield data[begin : begin + size_bytes]
        begin += size_bytes


def _raw_plane(stored: memoryview, plane: Plane, size_bytes: int, where: str) -> Bytes:
    view = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
    if plane.codec is not Codec.RAW or len(view) != size_bytes:
        raise IntegrityError(
            f"{where}: a raw plane of {size_bytes} bytes was expected, but the part holds a "
            f"{plane.codec.value} plane of {len(view)}",
            where=where,
        )
    return np.frombuffer(view, np.uint8)


def _check_unused_nibbles(count: int, pieces: list[Bytes], shares: tuple[int, ...], where: str) -> None:
    for piece, share in zip(pieces, shares, strict=True):
        if count % share and piece[-1] >> 4:
            raise IntegrityError(f"{where}: the unused nibble behind the last element is not 0", where=where)


# Pieces of planes → elements. `out` holds one batch: whole frames, or a single shorter one.


def _merge_for(tensor: Tensor, tier: Tier) -> Callable[[Bytes, list[Bytes], Scratch], None]:
    if tensor.encoding is Encoding.BF16_3:
        return _merge_draft if tier is Tier.DRAFT else _merge_refine
    return _merge_byte_pairs if tensor.element_bytes == 2 else _merge_bytes


def _merge_draft(out: Bytes, pieces: list[Bytes], scratch: Scratch) -> None:
    words, (exponents, packed) = out.view(_WORD), pieces
    low, high = _widen_nibbles(packed, scratch)
    # A multiplication puts a copy of the byte where its nibble's sign belongs and one where its mantissa
    # bits do; they do not overlap, so nothing is carried.
    np.multiply(high, np.uint16(0x1010), out=low)
    np.multiply(high, np.uint16(0x0101), out=high)
    bits = scratch.words[: words.size]
    np.bitwise_and(bits, _SIGN_AND_TOP_BITS, out=bits)
    np.bitwise_or(bits, _MIDPOINT, out=bits)
    np.copyto(words, exponents)
    np.multiply(words, np.uint16(1 << 7), out=words)  # numpy multiplies faster than it shifts left
    np.bitwise_or(words, bits, out=words)


def _merge_refine(out: Bytes, pieces: list[Bytes], scratch: Scratch) -> None:
    words, (packed,) = out.view(_WORD), pieces
    low, high = _widen_nibbles(packed, scratch)
    np.bitwise_and(high, _LOW_BITS, out=low)
    np.right_shift(high, np.uint16(4), out=high)
    # Assigned under a mask, never XORed: a part that is decoded twice must give the same weights.
    np.bitwise_and(words, ~_LOW_BITS, out=words)
    np.bitwise_or(words, scratch.words[: words.size], out=words)


def _widen_nibbles(packed: Bytes, scratch: Scratch) -> tuple[Words, Words]:
    """Room for the elements of the low and of the high nibbles, (frames, half) each; the bytes stand in the latter.

    Together they are the front of `scratch.words`, frame by frame: of an odd count, the unused nibble is last.
    """
    half = min(packed.size, FRAME_ELEMENTS // 2)
    room = scratch.words[: 2 * packed.size].reshape(-1, 2, half)
    np.copyto(room[:, 1], packed.reshape(-1, half))
    return room[:, 0], room[:, 1]


def _merge_byte_pairs(out: Bytes, pieces: list[Bytes], _: Scratch) -> None:
    """Twice as fast as `_merge_bytes`; for wider elements the same trick gains nothing."""
    words, (low, high) = out.view(_WORD), pieces
    np.copyto(words, high)
    np.multiply(words, np.uint16(1 << 8), out=words)
    np.bitwise_or(words, low, out=words)


def _merge_bytes(out: Bytes, pieces: list[Bytes], _: Scratch) -> None:
    columns = out.reshape(-1, len(pieces))
    for place, piece in enumerate(pieces):
        np.copyto(columns[:, place], piece)
