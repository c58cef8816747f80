"""Elements → planes: a stretch of a tensor cut into byte streams that compress, and come in tiers.

For packing; `fill.py` is the way back. Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. It does
not know parts, blobs or digests.

`native/split.c` cuts floats into bits, `sparse.py` takes out the zeros. `share` below is the number of elements that
share one byte of a plane (`plane_shares`): 2 for nibbles.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..native.split import Cut, room_bytes, split
from . import zstd
from .delta import difference
from .manifest import DTYPE_BITS, FRAME_ELEMENTS, Codec, Encoding, Tier
from .sparse import count_values, take_apart

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

_MAX_SAMPLE_FRAMES = 2
_BEGIN_BYTES = 16_384
_LEVEL_1_MIN_GAIN = 0.1  # over literals only; frames with matches decode at a third of the speed


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


def encode_segment(
    dtype: str, encoding: Encoding, data: Bytes, room: Bytes | None = None
) -> dict[Tier, list[CodedPlane]]:
    """The planes of each tier, in the format's order. Some may be views of `data` and of `room`: keep
    them as long.

    `data` is the segment's bytes, contiguous. With a `room` of `encoding_room_bytes`, which may be used
    again, floats take no other memory; else up to twice their size.
    """
    if encoding is Encoding.SAME:
        return {}
    if encoding.is_whole:
        return {encoding.tiers[0]: [(Codec.RAW, data.data)]}
    if encoding.is_sparse:
        return _encode_sparse(dtype, encoding, data, room)
    if encoding.float_format is None:
        element_bytes = max(1, DTYPE_BITS[dtype] // 8)
        columns = data.reshape(-1, element_bytes)
        planes = (np.ascontiguousarray(columns[:, place]) for place in range(element_bytes))
        return {encoding.tiers[0]: [_code_plane(plane, share=1) for plane in planes]}
    return _encode_float(data.view(_word_type(encoding.float_format)), encoding, room)


def encoding_room_bytes(encoding: Encoding, count: int) -> int:
    """The room that `encode_segment` uses at most for `count` elements."""
    if encoding.float_format is None:
        return 0
    return sum(room_bytes(count, _cuts(encoding, tier)) for tier in encoding.tiers)


def _word_type(float_format: FloatFormat) -> np.dtype[Any]:
    return np.dtype(f"<u{float_format.bits // 8}")


def num_values(encoding: Encoding, data: Bytes) -> int | None:
    """The `values` that a segment of these bytes states; None unless the encoding is sparse."""
    return count_values(data.view(_sparse_word(encoding))) if encoding.is_sparse else None


def _sparse_word(encoding: Encoding) -> np.dtype[Any]:
    return np.dtype(np.uint8) if encoding.float_format is None else _word_type(encoding.float_format)


def _encode_sparse(
    dtype: str, encoding: Encoding, data: Bytes, room: Bytes | None
) -> dict[Tier, list[CodedPlane]]:
    elements = take_apart(data.view(_sparse_word(encoding)))
    coded = encode_segment(dtype, encoding.dense, elements.values.view(np.uint8), room)
    first = [elements.mask] if elements.signs is None else [elements.mask, elements.signs]
    coded[encoding.tiers[0]][:0] = [_code_plane(plane, share=8) for plane in first]
    return coded


class _Coder(enum.Enum):
    """The way that a plane is stored."""

    RAW = enum.auto()
    HUF = enum.auto()  # frames of literals alone
    LEVEL_1 = enum.auto()  # frames with matches


def _code_plane(plane: Bytes, *, share: int) -> CodedPlane:
    """The plane as zstd frames where a sample of it, and then the whole, says that it pays; else as
    it is.
    """
    if not plane.size:  # the signs of no zeros
        return Codec.RAW, plane.data
    frame_bytes = FRAME_ELEMENTS // share
    coder = _choose_coder(_sample(plane, frame_bytes), frame_bytes)
    if coder is _Coder.RAW:
        return Codec.RAW, plane.data
    coded = zstd.compress_frames(plane.data, frame_bytes, huf=coder is _Coder.HUF)
    return (Codec.ZSTD, coded) if _pays(len(coded), plane.size) else (Codec.RAW, plane.data)


def _pays(coded_bytes: int, size_bytes: int) -> bool:
    return coded_bytes <= (1 - MIN_PLANE_GAIN) * size_bytes


def _choose_coder(sample: Bytes, frame_bytes: int, *, is_exponents: bool = False) -> _Coder:
    """The coder that a sample speaks for. The begin of it tells whether matches save anything, which of
    weights they do not; then exponents are coded without more trials.
    """
    begin = sample[:_BEGIN_BYTES].data
    has_matches = _coded_bytes(begin, frame_bytes, huf=False) < _coded_bytes(begin, frame_bytes, huf=True)
    if is_exponents and not has_matches:
        return _Coder.HUF
    huf_bytes = _coded_bytes(sample.data, frame_bytes, huf=True)
    if (
        has_matches
        and _coded_bytes(sample.data, frame_bytes, huf=False) <= (1 - _LEVEL_1_MIN_GAIN) * huf_bytes
    ):
        return _Coder.LEVEL_1
    return _Coder.HUF if _pays(huf_bytes, sample.size) else _Coder.RAW


def _coded_bytes(data: memoryview, frame_bytes: int, *, huf: bool) -> int:
    return len(zstd.compress_frames(data, frame_bytes, huf=huf))


def _sample(content: NDArray[Any], frame: int) -> NDArray[Any]:
    """A few whole frames, of `frame` items, from all over the content; all of it when it has only one."""
    num_frames = -(-content.size // frame)
    if num_frames <= 1:
        return content
    num_samples = min(_MAX_SAMPLE_FRAMES, -(-num_frames // 8))
    starts = [index * num_frames // num_samples * frame for index in range(num_samples)]
    return np.concatenate([content[start : start + frame] for start in starts])


def _encode_float(
    words: NDArray[Any], encoding: Encoding, room: Bytes | None
) -> dict[Tier, list[CodedPlane]]:
    """The planes of n bit patterns. A sample of them says how each plane is stored."""
    cuts = {tier: _cuts(encoding, tier) for tier in encoding.tiers}
    all_cuts = [cut for of_tier in cuts.values() for cut in of_tier]
    coders = [_Coder.RAW] * len(all_cuts)
    if words.size:
        samples = split(_sample(words, FRAME_ELEMENTS), all_cuts, room=room)
        coders = [
            _choose_coder(sample, FRAME_ELEMENTS * cut.bits // 8, is_exponents=cut.is_exponents)
            for sample, cut in zip(samples, all_cuts, strict=True)
        ]
    planes = split(words, all_cuts, coded=[coder is _Coder.HUF for coder in coders], room=room)
    coded = iter([_finish_plane(words, *each) for each in zip(planes, coders, all_cuts, strict=True)])
    return {tier: [next(coded) for _ in of_tier] for tier, of_tier in cuts.items()}


def _finish_plane(words: NDArray[Any], plane: Bytes, coder: _Coder, cut: Cut) -> CodedPlane:
    """A plane as `split` gives it, or in other frames, or raw where frames do not pay."""
    size_bytes = -(-words.size * cut.bits // 8)
    coded = plane.data
    if coder is _Coder.LEVEL_1:
        coded = memoryview(zstd.compress_frames(coded, FRAME_ELEMENTS * cut.bits // 8, huf=False))
    if coder is not _Coder.RAW and _pays(len(coded), size_bytes):
        return Codec.ZSTD, coded
    return Codec.RAW, split(words, [cut])[0].data if coder is _Coder.HUF else plane.data


@functools.cache
def _cuts(encoding: Encoding, tier: Tier) -> tuple[Cut, ...]:
    """The bits of each plane in one of the tiers of floats."""
    float_format, before = encoding.float_format, encoding.bits_before(tier)
    assert float_format is not None
    bits, mantissa_bits = float_format.bits, float_format.mantissa_bits
    known = encoding.mantissa_bits(tier)
    cuts: list[Cut] = []
    # Of the field, whose highest bit in the first tier is the sign: what is below a plane.
    below = 1 + known if before is None else known - before
    plane_bits = encoding.plane_bits(tier, bits // 8)
    if before is None:
        plane_bits = plane_bits[1:]
        cuts.append(Cut(8, mantissa_bits, (1 << float_format.exponent_bits) - 1, is_exponents=True))
    for num in plane_bits:
        below -= num
        has_sign = before is None and not cuts[1:]
        mask = (1 << num - has_sign) - 1
        sign = (bits - num, 1 << num - 1) if has_sign else (0, 0)
        cuts.append(Cut(num, mantissa_bits - known + below, mask, *sign))
    return tuple(cuts)


def encode_differences(dtype: str, data: Bytes, base: Bytes) -> dict[Tier, list[CodedPlane]]:
    """The planes of a segment's differences to the base's bytes. Takes twice their size in memory."""
    word = np.dtype(f"<u{max(1, DTYPE_BITS[dtype] // 8)}")
    return encode_segment(dtype, Encoding.DELTA, difference(data.view(word), base.view(word)).view(np.uint8))
