"""Sparse encodings: every bit comes back, tier by tier, and zeros are exact from the first one on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.test_codec import COUNTS, FLOATS, made_of, words
from tests.support.artifacts import coarse
from tests.support.native import decoded_by, each_isa

from teneral.loader.format import codec
from teneral.loader.format.fill import Scratch, decode_planes
from teneral.loader.format.manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    Codec,
    Encoding,
    Plane,
    Segment,
    Tensor,
    Tier,
    align,
    decoded_plane_bytes,
)

SPARSE_FLOATS = ["bf16.sparse.3", "bf16.sparse.7", "bf16.sparse.1.3", "f16.sparse.3", "f16.sparse.1.9",
                 "f32.sparse.7", "f32.sparse.0.22", "f32.sparse.23"]  # fmt: skip
Stored = dict[Tier, tuple[bytes, tuple[Plane, ...]]]


def parts_of(name: str) -> tuple[str, Encoding, dict[Tier, int]]:
    """The dtype, the encoding, and the mantissa bits that each tier knows, from the name alone."""
    encoding = Encoding.find(name)
    assert encoding is not None
    family, _, *numbers = name.split(".")
    dtype, mantissa_bits = FLOATS[family]
    known = dict(zip((Tier.SKETCH, Tier.DRAFT)[-len(numbers) :], map(int, numbers), strict=True))
    if known[Tier.DRAFT] < mantissa_bits:
        known[Tier.REFINE] = mantissa_bits
    return dtype, encoding, known


def zeroed(data: np.ndarray, width: int, share: float, seed: int, *, negative: bool = False) -> np.ndarray:
    """The data with that share of its elements zero; with `negative` as `w * mask` leaves them: signs stay."""
    rng = np.random.default_rng(seed)
    elements = data.copy().view(f"<u{width}")
    chosen = rng.random(elements.size) < share
    sign = 1 << 8 * width - 1 if negative and width > 1 else 0
    elements[chosen] &= sign
    return elements.view(np.uint8)


def stored(dtype: str, encoding: Encoding, data: np.ndarray) -> tuple[Stored, int]:
    """Each tier's planes in a part of its own, and how many values there are."""
    found: Stored = {}
    for tier, coded in codec.encode_segment(dtype, encoding, data).items():
        part, planes = bytearray(), []
        for plane_codec, content in coded:
            part += bytes(align(len(part), 8) - len(part))
            planes.append(Plane(plane_codec, len(part), len(content)))
            part += content
        found[tier] = bytes(part), tuple(planes)
    num = codec.num_values(encoding, data)
    assert num is not None
    return found, num


def decode(
    dtype: str, encoding: Encoding, parts: Stored, num: int, tier: Tier, out: np.ndarray, count: int
) -> None:
    content, planes = parts[tier]
    tensor = Tensor(0, "w", dtype, (count,), 0, encoding, 0)
    decode_planes(tensor, Segment(0, 0, count, planes, num), tier, memoryview(content), out, Scratch())


def check_tiers(name: str, data: np.ndarray) -> None:
    """Each tier, decoded once or twice: values as a dense encoding has them, zeros exact; at last every bit."""
    dtype, encoding, known = parts_of(name)
    width = DTYPE_BITS[dtype] // 8
    count = data.size // width
    parts, num = stored(dtype, encoding, data)
    assert list(parts) == list(known)
    out = np.full_like(data, 0xA5)
    is_zero = (data.view(f"<u{width}") << np.array(1, f"<u{width}")) == 0
    for tier, bits in known.items():
        sizes = decoded_plane_bytes(encoding, tier, width, count, num)
        assert all(
            plane.size_bytes == size or plane.codec is Codec.ZSTD
            for plane, size in zip(parts[tier][1], sizes, strict=True)
        )
        expected = np.where(is_zero, data.view(f"<u{width}"), coarse(dtype, bits, data).view(f"<u{width}"))
        for _ in range(2):
            decode(dtype, encoding, parts, num, tier, out, count)
            assert np.array_equal(out.view(f"<u{width}"), expected), tier
    assert np.array_equal(out, data)


@each_isa
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SPARSE_FLOATS),
    kind=st.sampled_from(["weights", "repetitions", "noise"]),
    count=COUNTS,
    share=st.sampled_from([0.0, 0.02, 0.3, 0.5, 0.9, 0.999]),
    negative=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_every_tier_and_every_bit_comes_back(
    isa: str, name: str, kind: str, count: int, share: float, negative: bool, seed: int
) -> None:
    width = DTYPE_BITS[parts_of(name)[0]] // 8
    data = zeroed(made_of(kind, count * width, seed), width, share, seed, negative=negative)
    if not (data.view(f"<u{width}") << np.array(1, f"<u{width}")).any():
        data[0] = 1  # a segment has at least one value
    with decoded_by(isa):
        check_tiers(name, data)


@each_isa
@pytest.mark.parametrize("name", [name for name in SPARSE_FLOATS if not name.startswith("f32")])
def test_all_bit_patterns_of_16_bits_come_back(isa: str, name: str) -> None:
    patterns = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype="<u2"))
    mixed = np.zeros(3 << 16, "<u2")
    mixed[::3] = patterns
    with decoded_by(isa):
        check_tiers(name, patterns.view(np.uint8))
        check_tiers(name, mixed.view(np.uint8))


@each_isa
def test_infinities_payloads_of_nan_and_denormals_of_fp32_come_back(isa: str) -> None:
    patterns = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x3F800000]
    data = np.array([pattern | sign for pattern in patterns for sign in (0, 1 << 31)], "<u4")
    with decoded_by(isa):
        check_tiers("f32.sparse.7", data.view(np.uint8))


@each_isa
@pytest.mark.parametrize("runs", [(0, 40_000), (70_000, 0), (3, 70_000, 1, 66_000, 9), (131_072, 131_072)])
def test_long_runs_of_values_and_of_zeros_come_back(isa: str, runs: tuple[int, ...]) -> None:
    pieces = [np.full(run, 0x3F81 if number % 2 else 0, "<u2") for number, run in enumerate(runs)]
    data = np.concatenate([*pieces, np.array([0x8000, 0xBF80, 0], "<u2")]).view(np.uint8)
    with decoded_by(isa):
        check_tiers("bf16.sparse.3", data)


@each_isa
@given(count=COUNTS, share=st.sampled_from([0.0, 0.5, 0.99]), seed=st.integers(0, 1 << 16))
@settings(max_examples=20, deadline=None)
def test_bytes_come_back(isa: str, count: int, share: float, seed: int) -> None:
    data = zeroed(made_of("noise", count, seed), 1, share, seed)
    data[-1] = 0x80
    parts, num = stored("I8", Encoding.BYTES_SPARSE, data)
    out = np.full_like(data, 0xA5)
    with decoded_by(isa):
        decode("I8", Encoding.BYTES_SPARSE, parts, num, Tier.DRAFT, out, count)
    assert np.array_equal(out, data)


@each_isa
def test_floats_at_odd_addresses_come_back_and_nothing_behind_them_is_written(isa: str) -> None:
    data = zeroed(made_of("noise", 2 * 1003, 1), 2, 0.5, 1)
    _, encoding, known = parts_of("bf16.sparse.3")
    parts, num = stored("BF16", encoding, data)
    for shift in (0, 1):
        memory = np.full(shift + data.size + 64, 0x5A, np.uint8)
        with decoded_by(isa):
            for tier in known:
                decode("BF16", encoding, parts, num, tier, memory[shift : shift + data.size], 1003)
        assert np.array_equal(memory[shift : shift + data.size], data)
        assert (memory[shift + data.size :] == 0x5A).all()


def test_the_example_of_the_format_is_stored_as_the_page_says() -> None:
    a, b, c, d = 0x3C01, 0xBC02, 0x0001, 0x7FC1
    data = words(0, a, b, 0, 0, c, 0x8000, 0, 0, d)
    _, encoding, _ = parts_of("bf16.sparse.3")
    parts, num = stored("BF16", encoding, data)
    assert num == 4
    content, planes = parts[Tier.DRAFT]
    pieces = [content[plane.offset_bytes : plane.offset_bytes + plane.size_bytes] for plane in planes]
    assert [piece.hex() for piece in pieces[:2]] == ["2602", "08"]
    assert [len(piece) for piece in pieces[2:]] == [4, 2]
    assert [plane.size_bytes for plane in parts[Tier.REFINE][1]] == [2]


@pytest.mark.parametrize("name", ["sparse", "bf16.sparse", "bf16.sparse.8", "bf16.sparse.3.3", "whole.sparse",
                                  "bytes.sparse.sketch", "bf16.3.sparse", "f16.sparse.11"])  # fmt: skip
def test_there_is_no_encoding_called(name: str) -> None:
    assert Encoding.find(name) is None


def test_an_encoding_knows_its_dense_and_its_sparse_twin() -> None:
    for name in ("bf16.3", "f16.1.9", "f32.23"):
        dense = Encoding.find(name)
        assert dense is not None
        assert dense.sparse is not None
        assert dense.sparse.is_sparse
        assert dense.sparse.dense is dense is dense.dense
        assert dense.sparse.sparse is None
    assert Encoding.BYTES.sparse is Encoding.BYTES_SPARSE
    assert Encoding.WHOLE.sparse is None
    assert Encoding.BYTES_SKETCH.sparse is None


def test_a_whole_frame_of_zeros_between_values_costs_next_to_nothing() -> None:
    data = np.zeros(8 * FRAME_ELEMENTS, "<u2")
    data[0] = 0x3F80
    parts, _ = stored("BF16", parts_of("bf16.sparse.3")[1], data.view(np.uint8))
    assert sum(len(content) for content, _ in parts.values()) < 600
