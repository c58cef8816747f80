"""Elements ↔ planes: how a stretch of a tensor is cut into byte streams that compress, and come in
tiers.

Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. Decodes in batches of a few
frames (`FRAME_ELEMENTS` elements each): what is decompressed is merged while it is still in the
cache, and calls are few, since each one gives the GIL up and has to get it back. It does not know
parts, blobs, digests or whose memory it writes to.

`planes.py` cuts floats into bits, `sparse.py` takes out the zeros. `share` below is the number of elements that
share one byte of a plane (`plane_shares`): 2 for nibbles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import IntegrityError
from ..native import merge as native
from . import zstd
from .delta import add_difference, difference
from .manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    Codec,
    Encoding,
    Plane,
    Segment,
    Tensor,
    Tier,
    plane_shares,
)
from .planes import Room, has_unused_bits, kept_bits, merge_floats, split_floats, word_type
from .sparse import Scatter, count_values, has_bits_behind, take_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .encoding import FloatFormat

    Bytes = NDArray[np.uint8]
    CodedPlane = tuple[Codec, bytes | memoryview]

# Below it a plane stays raw: decoding would cost more than the bytes that it saves.
MIN_PLANE_GAIN = 0.03
MIN_SPLIT_ELEMENTS = 1024  # smaller matrices of floats stay whole
# Mantissa bits of the draft that suit a dtype. That of fp32 is what bf16 has, truncated.
DEFAULT_DRAFT_BITS = {"BF16": 3, "F16": 3, "F32": 7}

_WORD = np.dtype("<u2")
_MAX_BATCH_FRAMES = 8  # more of them gain little, and leave the cache; elements of 8 bytes need 8
_MAX_SAMPLE_FRAMES = 4
# Below 30 % a plane has so few frequent symbols that matches of them are found everywhere, and are in the
# way. The exponents of dense weights take 33 %.
_WEIGHED_BELOW = 0.3
_LEVEL_1_MIN_GAIN = 0.1  # over literals only; frames with matches decode at a third of the speed


class Scratch:
    """Working memory of one thread, 3 MiB, used again for every batch; with sparse tensors up to 8.
    Not to be shared.
    """

    __slots__ = ("_sparse", "planes", "room")

    def __init__(self) -> None:
        elements = _MAX_BATCH_FRAMES * FRAME_ELEMENTS
        self.planes: Bytes = np.empty(2 * elements, np.uint8)  # decompressed
        self.room = Room(
            np.empty(2 * elements, np.uint8), np.empty(elements, np.uint8), np.empty(elements, np.uint8)
        )
        self._sparse: dict[str, Bytes] = {}

    def of_sparse(self, name: str, size_bytes: int) -> Bytes:
        """Memory that only sparse tensors need: taken when they first do."""
        if self._sparse.get(name, self.planes[:0]).size < size_bytes:
            self._sparse[name] = np.empty(size_bytes, np.uint8)
        return self._sparse[name][:size_bytes]


def choose_encoding(
    dtype: str, shape: tuple[int, ...], *, draft_bits: int | None = None, sketch_bits: int | None = None
) -> Encoding:
    """The best encoding for a tensor: floats with these mantissa bits in the draft, or what suits
    their dtype.

    What has no tiers is in the first one that the artifact has. Vectors stay whole: they are small,
    and a model needs them exact from the beginning.
    """
    is_matrix = len(shape) >= 2
    if dtype in DEFAULT_DRAFT_BITS and is_matrix and math.prod(shape) >= MIN_SPLIT_ELEMENTS:
        bits = DEFAULT_DRAFT_BITS[dtype] if draft_bits is None else draft_bits
        return Encoding.of_float(dtype, bits, sketch_bits)
    if is_matrix and dtype not in DEFAULT_DRAFT_BITS:
        return Encoding.BYTES if sketch_bits is None else Encoding.BYTES_SKETCH
    return Encoding.WHOLE if sketch_bits is None else Encoding.WHOLE_SKETCH


# Elements → planes


def encode_segment(dtype: str, encoding: Encoding, data: Bytes) -> dict[Tier, list[CodedPlane]]:
    """The planes of each tier, in the format's order. Some may be views of `data`: keep it as long
    as them.

    `data` is the segment's bytes, contiguous. Takes up to twice their size in memory besides.
    """
    if encoding is Encoding.SAME:
        return {}
    if encoding.is_whole:
        return {encoding.tiers[0]: [(Codec.RAW, data.data)]}
    if encoding.is_sparse:
        return _encode_sparse(dtype, encoding, data)
    if encoding.float_format is None:
        element_bytes = max(1, DTYPE_BITS[dtype] // 8)
        columns = data.reshape(-1, element_bytes)
        planes = (np.ascontiguousarray(columns[:, place]) for place in range(element_bytes))
        return {encoding.tiers[0]: [_code_plane(plane, share=1) for plane in planes]}
    words = data.view(word_type(encoding.float_format))
    return {tier: _split_float(words, encoding, tier) for tier in encoding.tiers}


def num_values(encoding: Encoding, data: Bytes) -> int | None:
    """The `values` that a segment of these bytes states; None unless the encoding is sparse."""
    return count_values(data.view(_sparse_word(encoding))) if encoding.is_sparse else None


def _sparse_word(encoding: Encoding) -> np.dtype[Any]:
    return np.dtype(np.uint8) if encoding.float_format is None else word_type(encoding.float_format)


def _encode_sparse(dtype: str, encoding: Encoding, data: Bytes) -> dict[Tier, list[CodedPlane]]:
    elements = take_apart(data.view(_sparse_word(encoding)))
    coded = encode_segment(dtype, encoding.dense, elements.values.view(np.uint8))
    first = [elements.mask] if elements.signs is None else [elements.mask, elements.signs]
    coded[encoding.tiers[0]][:0] = [_code_plane(plane, share=8) for plane in first]
    return coded


def _code_plane(plane: Bytes, *, share: int) -> CodedPlane:
    """The plane as zstd frames where a sample of it, and then the whole, says that it pays; else as
    it is.
    """
    frame_bytes = FRAME_ELEMENTS // share
    if not plane.size:  # the signs of no zeros
        return Codec.RAW, plane.data
    sample = _sample(plane, frame_bytes)
    huf_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=True))
    level_1_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=False))
    if min(huf_bytes, level_1_bytes) <= (1 - MIN_PLANE_GAIN) * sample.size:
        huf = level_1_bytes > (1 - _LEVEL_1_MIN_GAIN) * huf_bytes
        weighed = huf and huf_bytes < _WEIGHED_BELOW * sample.size
        if weighed:  # it looks less far for matches, too
            weighed_bytes = len(zstd.compress_frames(sample.data, frame_bytes, huf=True, weighed=True))
            weighed = weighed_bytes <= huf_bytes
        coded = zstd.compress_frames(plane.data, frame_bytes, huf=huf, weighed=weighed)
        if len(coded) <= (1 - MIN_PLANE_GAIN) * plane.size:
            return Codec.ZSTD, coded
    return Codec.RAW, plane.data


def _sample(plane: Bytes, frame_bytes: int) -> Bytes:
    """A few whole frames from all over the plane; the plane itself when it has only one."""
    num_frames = -(-plane.size // frame_bytes)
    num_samples = min(_MAX_SAMPLE_FRAMES, -(-num_frames // 8))
    starts = [index * num_frames // num_samples * frame_bytes for index in range(num_samples)]
    return np.concatenate([plane[start : start + frame_bytes] for start in starts])


def _split_float(words: NDArray[Any], encoding: Encoding, tier: Tier) -> list[CodedPlane]:
    """One tier's planes of n bit patterns."""
    shares = plane_shares(encoding, tier, words.itemsize)
    planes = [np.empty(-(-words.size // share), np.uint8) for share in shares]
    begin = 0
    for count in _batch_counts(words.size, _MAX_BATCH_FRAMES):
        end = begin + count
        # All batches but the last are whole frames, so each plane's bytes are cut between two of
        # them.
        pieces = [
            plane[begin // share : -(-end // share)] for plane, share in zip(planes, shares, strict=True)
        ]
        split_floats(words[begin:end], encoding, tier, pieces)
        begin = end
    return [_code_plane(plane, share=share) for plane, share in zip(planes, shares, strict=True)]


# Planes → elements


def decode_planes(
    tensor: Tensor,
    segment: Segment,
    tier: Tier,
    stored: memoryview,
    out: memoryview | Bytes,
    scratch: Scratch,
    base: Bytes | None = None,
) -> None:
    """Write what one tier says about a segment into `out`, the segment's own bytes in the slab.

    `stored` is its whole part, already verified. Differences are added to the `base`'s bytes where they
    are given, else to `out`, which holds them: once.
    Else the first tier that an encoding has makes usable weights, their missing bits at the
    midpoint; a later one replaces these bits, so it needs the tiers before it there. Each may be
    repeated until the next one was decoded. Raises `IntegrityError` when a plane does not decode to
    its exact size, or has bits that mean nothing; `out` is then undefined.
    """
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    elements = np.frombuffer(out, np.uint8)
    encoding = tensor.encoding
    if segment.is_delta or encoding is Encoding.DELTA:
        _add_differences(tensor, segment, stored, elements, scratch, where, base)
        return
    if encoding.is_whole:
        np.copyto(elements, _raw_plane(stored, segment.planes[0], elements.size, where))
        return
    if encoding.is_sparse:
        _decode_sparse(tensor, segment, tier, stored, elements, scratch, where)
        return
    shares = plane_shares(encoding, tier, tensor.element_bytes)
    max_frames = max_batch_frames(encoding, tier, tensor.element_bytes)
    counts = _batch_counts(segment.count, max_frames)
    rooms = _cut(scratch.planes, [max_frames * FRAME_ELEMENTS // share for share in shares])
    planes = [
        _plane_pieces(stored, plane, counts, share, room, where)
        for plane, share, room in zip(segment.planes, shares, rooms, strict=True)
    ]
    begin = 0
    for count, *pieces in zip(counts, *planes, strict=True):  # strictly, so that planes check their own end
        _check_unused_bits(count, pieces, shares, where)
        end = begin + count * tensor.element_bytes
        if encoding.float_format is None:
            _merge_bytes(elements[begin:end], pieces)
        else:
            if tier is encoding.tiers[0]:
                _check_exponents(pieces[0], encoding.float_format, where)
            merge_floats(elements[begin:end], pieces, encoding, tier, scratch.room)
        begin = end


def _add_differences(
    tensor: Tensor,
    segment: Segment,
    stored: memoryview,
    elements: Bytes,
    scratch: Scratch,
    where: str,
    base: Bytes | None,
) -> None:
    """As `decode_planes`, of differences: they are put together batch by batch, and added."""
    width = tensor.element_bytes
    word = np.dtype(f"<u{width}")
    max_frames = max_batch_frames(Encoding.DELTA, Tier.REFINE, width)
    counts = _batch_counts(segment.count, max_frames)
    rooms = _cut(scratch.planes, [max_frames * FRAME_ELEMENTS] * width)
    planes = [
        _plane_pieces(stored, plane, counts, 1, room, where)
        for plane, room in zip(segment.planes, rooms, strict=True)
    ]
    begin = 0
    for count, *pieces in zip(counts, *planes, strict=True):
        out = elements[begin : begin + count * width]
        if base is not None:
            np.copyto(out, base[begin : begin + out.size])
        if not native.add_differences(out, pieces):
            differences = scratch.room.words[: out.size]
            _merge_bytes(differences, pieces)
            add_difference(out.view(word), differences.view(word))
        begin += out.size


def encode_differences(dtype: str, data: Bytes, base: Bytes) -> dict[Tier, list[CodedPlane]]:
    """The planes of a segment's differences to the base's bytes. Takes twice their size in memory."""
    word = np.dtype(f"<u{max(1, DTYPE_BITS[dtype] // 8)}")
    return encode_segment(dtype, Encoding.DELTA, difference(data.view(word), base.view(word)).view(np.uint8))


def _decode_sparse(
    tensor: Tensor,
    segment: Segment,
    tier: Tier,
    stored: memoryview,
    elements: Bytes,
    scratch: Scratch,
    where: str,
) -> None:
    """As `decode_planes`: values are made batch by batch, as dense ones are, and then go to their
    places.
    """
    encoding, num = tensor.encoding, segment.values
    assert num is not None
    planes, words = segment.planes, elements.view(_sparse_word(encoding))
    is_first = tier is encoding.tiers[0]
    if is_first:
        signs = None
        mask = _read_bits(stored, planes[0], segment.count, scratch.of_sparse, "mask", where)
        planes = planes[1:]
        if encoding.float_format is not None:
            signs = _read_bits(stored, planes[0], segment.count - num, scratch.of_sparse, "signs", where)
            planes = planes[1:]
        has_signs = signs is not None and bool(signs.any())
        scatter = Scatter(words, mask, signs if has_signs else None, num_signs=segment.count - num)
    else:
        scatter = Scatter(words, keep=kept_bits(encoding, tier))
    for values in _value_batches(tensor, segment, tier, planes, stored, scratch, where):
        if not scatter.put(values.view(words.dtype)):
            raise _wrong_values(is_first, num, where)
    if not scatter.finish():
        raise _wrong_values(is_first, num, where)
    if scatter.has_zero and tier is encoding.tiers[-1]:
        raise IntegrityError(f"{where}: a value is a zero, where the mask says that it is not", where=where)


def _value_batches(
    tensor: Tensor,
    segment: Segment,
    tier: Tier,
    planes: tuple[Plane, ...],
    stored: memoryview,
    scratch: Scratch,
    where: str,
) -> Iterator[Bytes]:
    """The values of a sparse segment, or in a later tier the bits that are new in them, in batches."""
    dense, element_bytes = tensor.encoding.dense, tensor.element_bytes
    is_first = tier is dense.tiers[0]
    shares = plane_shares(dense, tier, element_bytes)
    max_frames = max_batch_frames(dense, tier, element_bytes)
    counts = _batch_counts(segment.values or 0, max_frames)
    rooms = _cut(scratch.planes, [max_frames * FRAME_ELEMENTS // share for share in shares])
    all_pieces = [
        _plane_pieces(stored, plane, counts, share, room, where)
        for plane, share, room in zip(planes, shares, rooms, strict=True)
    ]
    for count, *pieces in zip(counts, *all_pieces, strict=True):
        _check_unused_bits(count, pieces, shares, where)
        if dense.float_format is None:
            yield pieces[0]
            continue
        values = scratch.of_sparse("values", max_frames * FRAME_ELEMENTS * element_bytes)
        values = values[: count * element_bytes]
        if is_first:
            _check_exponents(pieces[0], dense.float_format, where)
        else:
            values.fill(0)
        merge_floats(values, pieces, dense, tier, scratch.room)
        yield values


def _read_bits(
    stored: memoryview,
    plane: Plane,
    num_bits: int,
    memory: Callable[[str, int], Bytes],
    name: str,
    where: str,
) -> Bytes:
    """A mask or signs, whole: at most 2 MiB."""
    size_bytes = -(-num_bits // 8)
    if plane.codec is Codec.ZSTD:
        bits = memory(name, size_bytes)
        src = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
        frames = zstd.FrameReader(src, FRAME_ELEMENTS // 8, where=where)
        frames.read_into(bits)
        frames.finish()
    else:
        bits = _raw_plane(stored, plane, size_bytes, where)
    if has_bits_behind(bits, num_bits):
        raise IntegrityError(f"{where}: the unused bits behind the last of its {name} are not 0", where=where)
    return bits


def _wrong_values(is_first: bool, num: int, where: str) -> IntegrityError:
    found = "the mask has" if is_first else "the tiers before have"
    return IntegrityError(f"{where}: {found} another number of values than {num}", where=where)


def unpack_planes(
    tensor: Tensor, segment: Segment, tier: Tier, stored: memoryview, outs: Sequence[Bytes | None]
) -> None:
    """Write a segment's planes, one by one, into `outs` as they are before they are merged: a
    caller merges them elsewhere.

    `stored` is its whole part, already verified; each of `outs` has exactly its plane's decoded
    size. A plane whose `out` is None is left out: one of whole bytes, which may have any value.
    Raises as `decode_planes` does.
    """
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    encoding = tensor.encoding
    assert not encoding.is_sparse  # has no planes of elements
    shares = plane_shares(encoding, tier, tensor.element_bytes) or (1,)
    for number, (plane, out, share) in enumerate(zip(segment.planes, outs, shares, strict=True)):
        if out is None:
            continue
        if plane.codec is Codec.ZSTD and not encoding.is_whole:
            src = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
            frames = zstd.FrameReader(src, FRAME_ELEMENTS // share, where=where)
            frames.read_into(out)
            frames.finish()
        else:
            np.copyto(out, _raw_plane(stored, plane, out.size, where))
        if segment.count % share:
            _check_unused_bits(segment.count, [out], (share,), where)
        if number == 0 and encoding.float_format is not None and tier is encoding.tiers[0]:
            _check_exponents(out, encoding.float_format, where)


def max_batch_frames(encoding: Encoding, tier: Tier, element_bytes: int) -> int:
    """The planes and words of this many frames fit in the scratch."""
    byte_planes = plane_shares(encoding, tier, element_bytes).count(1)
    return _MAX_BATCH_FRAMES // max(1, byte_planes, element_bytes // 2)


def _batch_counts(count: int, max_frames: int) -> list[int]:
    """How many elements to decode at a time: up to `max_frames` whole frames; at last what is left
    of one.
    """
    num_whole, rest = divmod(count, FRAME_ELEMENTS)
    num_full, frames = divmod(num_whole, max_frames)
    counts = [max_frames * FRAME_ELEMENTS] * num_full + [frames * FRAME_ELEMENTS, rest]
    return [count for count in counts if count]


def _plane_pieces(
    stored: memoryview, plane: Plane, counts: list[int], share: int, room: Bytes, where: str
) -> Iterator[Bytes]:
    """The plane's bytes of each batch: views of `stored` where it is raw, else of `room`, again and
    again.
    """
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


def _check_unused_bits(count: int, pieces: list[Bytes], shares: tuple[int, ...], where: str) -> None:
    for piece, share in zip(pieces, shares, strict=True):
        if count % share and has_unused_bits(piece, 8 // share, count):
            raise IntegrityError(f"{where}: the unused bits behind the last element are not 0", where=where)


def _check_exponents(piece: Bytes, float_format: FloatFormat, where: str) -> None:
    bits = float_format.exponent_bits
    if bits < 8 and int(piece.max()) >> bits:
        raise IntegrityError(f"{where}: an exponent has more than {bits} bits", where=where)


# Pieces of planes → elements. `out` holds one batch: whole frames, or a single shorter one.


def _merge_bytes(out: Bytes, pieces: list[Bytes]) -> None:
    if native.interleave(out, pieces):
        return
    if len(pieces) == 2:
        _merge_byte_pairs(out, pieces)
        return
    columns = out.reshape(-1, len(pieces))
    for place, piece in enumerate(pieces):
        np.copyto(columns[:, place], piece)


def _merge_byte_pairs(out: Bytes, pieces: list[Bytes]) -> None:
    """Twice as fast as column by column; for wider elements the same trick gains nothing."""
    words, (low, high) = out.view(_WORD), pieces
    np.copyto(words, high)
    np.multiply(words, np.uint16(1 << 8), out=words)
    np.bitwise_or(words, low, out=words)
