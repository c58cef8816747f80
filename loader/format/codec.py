"""Elements → planes: a stretch of a tensor cut into byte streams that compress, and come in tiers.

For packing; `fill.py` is the way back. Pure computation on buffers; `docs/format.md`, "Encodings", is the norm. It does
not know parts, blobs or digests.

`native/split.c` cuts floats into bits, `sparse.py` takes out the zeros. `share` below is the number of elements that
share one byte of a plane (`plane_shares`): 2 for nibbles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..native.split import split
from . import zstd
from .delta import difference
from .manifest import DTYPE_BITS, FRAME_ELEMENTS, Codec, Encoding, Tier, plane_shares
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

_MAX_SAMPLE_FRAMES = 4
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
    words = data.view(_word_type(encoding.float_format))
    return {tier: _split_float(words, encoding, tier) for tier in encoding.tiers}


def _word_type(float_format: FloatFormat) -> np.dtype[Any]:
    return np.dtype(f"<u{float_format.bits // 8}")


def num_values(encoding: Encoding, data: Bytes) -> int | None:
    """The `values` that a segment of these bytes states; None unless the encoding is sparse."""
    return count_values(data.view(_sparse_word(encoding))) if encoding.is_sparse else None


def _sparse_word(encoding: Encoding) -> np.dtype[Any]:
    return np.dtype(np.uint8) if encoding.float_format is None else _word_type(encoding.float_format)


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
    huf = not _has_matches(sample, frame_bytes, huf_bytes)
    if huf and huf_bytes > (1 - MIN_PLANE_GAIN) * sample.size:
        return Codec.RAW, plane.data
    coded = zstd.compress_frames(plane.data, frame_bytes, huf=huf)
    return (Codec.ZSTD, coded) if len(coded) <= (1 - MIN_PLANE_GAIN) * plane.size else (Codec.RAW, plane.data)


def _has_matches(sample: Bytes, frame_bytes: int, huf_bytes: int) -> bool:
    """True if zstd's matches save so much of the sample, over literals alone, that they are worth their time. The first
    frame tells where they save next to nothing, as of weights.
    """
    first = sample[:frame_bytes]
    share = len(zstd.compress_frames(first.data, frame_bytes, huf=False)) / first.size
    if share > huf_bytes / sample.size:
        return False
    return (
        len(zstd.compress_frames(sample.data, frame_bytes, huf=False)) <= (1 - _LEVEL_1_MIN_GAIN) * huf_bytes
    )


def _sample(plane: Bytes, frame_bytes: int) -> Bytes:
    """A few whole frames from all over the plane; the plane itself when it has only one."""
    num_frames = -(-plane.size // frame_bytes)
    num_samples = min(_MAX_SAMPLE_FRAMES, -(-num_frames // 8))
    starts = [index * num_frames // num_samples * frame_bytes for index in range(num_samples)]
    return np.concatenate([plane[start : start + frame_bytes] for start in starts])


def _split_float(words: NDArray[Any], encoding: Encoding, tier: Tier) -> list[CodedPlane]:
    """One tier's planes of n bit patterns."""
    float_format, before = encoding.float_format, encoding.bits_before(tier)
    assert float_format is not None
    known = encoding.mantissa_bits(tier)
    shares = plane_shares(encoding, tier, words.itemsize)
    planes = [np.empty(-(-words.size // share), np.uint8) for share in shares]
    split(
        words,
        planes,
        encoding.plane_bits(tier, words.itemsize),
        has_exponents=before is None,
        field_bits=1 + known if before is None else known - before,
        mantissa_bits=float_format.mantissa_bits,
        known_bits=known,
    )
    return [_code_plane(plane, share=share) for plane, share in zip(planes, shares, strict=True)]


def encode_differences(dtype: str, data: Bytes, base: Bytes) -> dict[Tier, list[CodedPlane]]:
    """The planes of a segment's differences to the base's bytes. Takes twice their size in memory."""
    word = np.dtype(f"<u{max(1, DTYPE_BITS[dtype] // 8)}")
    return encode_segment(dtype, Encoding.DELTA, difference(data.view(word), base.view(word)).view(np.uint8))
