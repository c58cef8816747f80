"""The blocks in which ggml stores numbers: how each is laid out, and what it means.

A row of a tensor is a run of blocks. Each kind of block says what its numbers are as fp32; those
that are integers times one scale also give integers and scales, whose products are the very same
fp32 numbers. The layouts are those of ggml's `ggml-common.h`. Pure functions of arrays; files and
tensors are unknown here.

Everything takes blocks as bytes (B, block bytes) and gives (B, elements).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Levels = NDArray[np.int8]

MXFP4 = "MXFP4"  # a type's name: bytes of exponents, and floats of 4 bits
SMALL = 32  # elements of Q8_0 and the like
LARGE = 256  # of the K-quants
_LARGE_GROUPS = 8  # of 32 elements, in a block of Q4_K and Q5_K


class Integers(NamedTuple):
    """(B, elements) from -128 to 127, and the (B,) scale of each block. What they mean is their
    product.
    """

    levels: Levels
    scale: Floats


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types. `bits` is what its integers fit in, where it has them; else None."""

    name: str
    elements: int
    block_bytes: int
    to_floats: Callable[[Bytes], Floats]
    to_integers: Callable[[Bytes], Integers] | None = None
    bits: int | None = None
    dtype: str | None = None  # of the numbers, where they are stored plainly
    is_kept: bool = False  # products read the blocks as they are

    def row_bytes(self, columns: int) -> int:
        return columns // self.elements * self.block_bytes


def _half(blocks: Bytes, at: int) -> Floats:
    """(B,) the fp16 number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(B, n) → (B, 2n): the low halves of all bytes, then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """(B, 4) → (B, 32): bit j of each block's 32 as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _scaled(integers: Integers) -> Floats:
    product: Floats = integers.levels * integers.scale[:, None]
    return product


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Integers:
    return Integers(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Integers:
    return Integers(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q5_0(blocks: Bytes) -> Integers:
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(np.ascontiguousarray(blocks[:, 2:6]))
    return Integers(levels.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Floats:
    floats: Floats = _nibbles(blocks[:, 4:]) * _half(blocks, 0)[:, None] + _half(blocks, 2)[:, None]
    return floats


def _q5_1(blocks: Bytes) -> Floats:
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(np.ascontiguousarray(blocks[:, 4:8]))
    return levels * _half(blocks, 0)[:, None] + _half(blocks, 2)[:, None]


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E8M0 = np.where(np.arange(256) == 255, np.nan, np.exp2(np.arange(256) - 127.0)).astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    floats: Floats = _E2M1[_nibbles(blocks[:, 1:])] * _E8M0[blocks[:, 0]][:, None]
    return floats


def _large_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """(B, 12) → scales and minima (B, 8), 6 bits each: groups 4 to 7 have their top 2 bits next to
    those of 0 to 3.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & np.uint8(63), (third & np.uint8(15)) | ((first >> np.uint8(6)) << np.uint8(4))]
    minima = [second & np.uint8(63), (third >> np.uint8(4)) | ((second >> np.uint8(6)) << np.uint8(4))]
    return np.concatenate(scales, 1).astype(np.float32), np.concatenate(minima, 1).astype(np.float32)


def _large(blocks: Bytes, levels: Bytes) -> Floats:
    """Of levels (B, 8, 32): level · (d · scale) - (dmin · minimum), as ggml orders it."""
    scales, minima = _large_scales(blocks[:, 4:16])
    step = (_half(blocks, 0)[:, None] * scales)[:, :, None]
    floats: Floats = levels * step - (_half(blocks, 2)[:, None] * minima)[:, :, None]
    return floats.reshape(len(blocks), LARGE)


def _pairs_of_groups(packed: Bytes) -> Bytes:
    """(B, 128) → (B, 8, 32): each 32 bytes hold a group in their low halves and the next one in
    their high halves.
    """
    runs = packed.reshape(len(packed), 4, 1, SMALL)
    return np.concatenate([runs & np.uint8(15), runs >> np.uint8(4)], axis=2).reshape(
        -1, _LARGE_GROUPS, SMALL
    )


def _q4_k(blocks: Bytes) -> Floats:
    return _large(blocks, _pairs_of_groups(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    places = np.arange(_LARGE_GROUPS, dtype=np.uint8)[:, None]
    # Bit g of byte j is group g's j.
    fifth = (blocks[:, None, 16:48] >> places & np.uint8(1)) << np.uint8(4)
    return _large(blocks, _pairs_of_groups(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Bytes) -> Floats:
    """Two halves of 128 elements: 64 bytes with the low 4 bits, 32 with the high 2 of four
    quarters.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    levels = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    step = _half(blocks, 208)[:, None] * scales  # of 16 elements each
    product: Floats = levels.reshape(-1, 16, 16) * step[:, :, None]
    return product.reshape(-1, LARGE)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes with a scale and a minimum each, of 16 elements; then two bits an element."""
    scales = _half(blocks, 80)[:, None] * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minima = _half(blocks, 82)[:, None] * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    levels = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16)
    floats: Floats = levels * scales[:, :, None] - minima[:, :, None]
    return floats.reshape(-1, LARGE)


def _two_bits(packed: Bytes) -> Bytes:
    """(B, 64) → (B, 256): in each half, bits 2 j and 2 j + 1 of 32 bytes are elements 32 j to 32 j + 31."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    levels: Bytes = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return levels.reshape(-1, LARGE)


def _q3_k(blocks: Bytes) -> Floats:
    """Two bits an element, less 4 where its bit of the first 32 bytes is not set; scales of 6 bits, less 32."""
    places = np.arange(8, dtype=np.uint8)[:, None]
    third = (blocks[:, None, :32] >> places & np.uint8(1)).reshape(-1, LARGE).astype(np.int8)
    levels = _two_bits(blocks[:, 32:96]).view(np.int8) + (third - np.int8(1)) * np.int8(4)
    packed, shifts = blocks[:, 96:108], np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (packed[:, None, 8:] >> shifts & np.uint8(3)).reshape(-1, 16)
    scales = (_nibbles(packed[:, :8]) | high << np.uint8(4)).view(np.int8) - np.int8(32)
    step = _half(blocks, 108)[:, None] * scales
    product: Floats = levels.reshape(-1, 16, 16) * step[:, :, None]
    return product.reshape(-1, LARGE)


# The levels of IQ4_NL and IQ4_XS.
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scaled(Integers(_LEVELS[_nibbles(blocks[:, 2:])], _half(blocks, 0)))


def _iq4_xs(blocks: Bytes) -> Floats:
    """Groups of 32, with scales of 6 bits, less 32: the high 2 in a word, the low 4 in four bytes."""
    groups = np.arange(_LARGE_GROUPS)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> (2 * groups).astype(np.uint16) & np.uint16(3)
    low = blocks[:, 4 + groups // 2] >> (groups % 2 * 4).astype(np.uint8) & np.uint8(15)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    halves = np.ascontiguousarray(blocks[:, 8:]).reshape(-1, SMALL // 2)
    levels: Levels = _LEVELS[_nibbles(halves)].reshape(-1, _LARGE_GROUPS, SMALL)
    step: Floats = _half(blocks, 0)[:, None] * scales
    floats: Floats = levels * step[:, :, None]
    return floats.reshape(-1, LARGE)


def _integers(name: str, block_bytes: int, bits: int, read: Callable[[Bytes], Integers]) -> BlockType:
    return BlockType(name, SMALL, block_bytes, lambda blocks: _scaled(read(blocks)), read, bits)


# By ggml's numbers.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32, dtype="F32"),
    1: BlockType("F16", 1, 2, _f16, dtype="F16"),
    30: BlockType("BF16", 1, 2, _bf16, dtype="BF16"),
    2: _integers("Q4_0", 18, 4, _q4_0),
    3: BlockType("Q4_1", SMALL, 20, _q4_1, is_kept=True),
    6: replace(_integers("Q5_0", 22, 8, _q5_0), is_kept=True),
    7: BlockType("Q5_1", SMALL, 24, _q5_1, is_kept=True),
    8: _integers("Q8_0", 34, 8, _q8_0),
    10: BlockType("Q2_K", LARGE, 84, _q2_k, is_kept=True),
    11: BlockType("Q3_K", LARGE, 110, _q3_k, is_kept=True),
    12: BlockType("Q4_K", LARGE, 144, _q4_k, is_kept=True),
    13: BlockType("Q5_K", LARGE, 176, _q5_k, is_kept=True),
    14: BlockType("Q6_K", LARGE, 210, _q6_k, is_kept=True),
    20: BlockType("IQ4_NL", SMALL, 18, _iq4_nl, is_kept=True),
    23: BlockType("IQ4_XS", LARGE, 136, _iq4_xs, is_kept=True),
    39: BlockType(MXFP4, SMALL, 17, _mxfp4),
}

_KEPT = {kind.block_bytes: kind for kind in BLOCK_TYPES.values() if kind.is_kept}


def block_of_bytes(block_bytes: int) -> BlockType | None:
    """The type whose blocks products read as they are, by the bytes of one; None: there is none of that size."""
    return _KEPT.get(block_bytes)
