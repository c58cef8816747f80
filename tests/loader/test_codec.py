"""Elements ↔ planes: every bit comes back, tier by tier, as `docs/format.md` lays it out."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.format import codec
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
    plane_count,
)

COUNTS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([FRAME_ELEMENTS + step for step in (-1, 0, 1, 2)]),
    st.integers(1, 3 * FRAME_ELEMENTS),
)
WHOLE_BYTE_DTYPES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)


def made_of(kind: str, size_bytes: int, seed: int) -> np.ndarray:
    """Bytes that compress (weights, repetitions, zeros) or do not."""
    rng = np.random.default_rng(seed)
    if kind == "weights":
        words = (rng.normal(0, 0.02, size_bytes // 2 + 1).astype("<f4").view("<u4") >> 16).astype("<u2")
        return words.view(np.uint8)[:size_bytes].copy()
    if kind == "repetitions":
        return np.resize(np.arange(1 + seed % 700, dtype="<u2").view(np.uint8), size_bytes)
    if kind == "zeros":
        return np.zeros(size_bytes, np.uint8)
    return rng.integers(0, 256, size_bytes, dtype=np.uint8)


def store(
    dtype: str, encoding: Encoding, data: np.ndarray
) -> dict[Tier, tuple[memoryview, tuple[Plane, ...]]]:
    """Each tier's planes, laid out in a part of its own."""
    parts = {}
    for tier, coded in codec.encode_segment(dtype, encoding, data).items():
        part, planes = bytearray(), []
        for plane_codec, stored in coded:
            part += bytes(align(len(part), 8) - len(part))
            planes.append(Plane(plane_codec, len(part), len(stored)))
            part += stored
        parts[tier] = memoryview(bytes(part)), tuple(planes)
    return parts


def tensor_of(dtype: str, encoding: Encoding, count: int) -> Tensor:
    return Tensor(0, "w", dtype, (count,), 0, encoding, 0)


def decode(
    tensor: Tensor,
    parts: dict[Tier, tuple[memoryview, tuple[Plane, ...]]],
    tier: Tier,
    out: np.ndarray,
    scratch: codec.Scratch | None = None,
) -> None:
    stored, planes = parts[tier]
    segment = Segment(0, 0, tensor.num_elements, planes)
    codec.decode_planes(tensor, segment, tier, stored, out, scratch or codec.Scratch())


def words(*values: int) -> np.ndarray:
    return np.array(values, "<u2").view(np.uint8)


@given(
    dtype=st.sampled_from(WHOLE_BYTE_DTYPES),
    encoding=st.sampled_from([Encoding.WHOLE, Encoding.BYTES]),
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    count=COUNTS,
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=60, deadline=None)
def test_whole_and_byte_planes_give_every_bit_back(
    dtype: str, encoding: Encoding, kind: str, count: int, seed: int
) -> None:
    tensor = tensor_of(dtype, encoding, count)
    data = made_of(kind, tensor.size_bytes, seed)
    out = np.full_like(data, 0xA5)
    decode(tensor, store(dtype, encoding, data), Tier.DRAFT, out)
    assert np.array_equal(out, data)


@given(
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    count=COUNTS,
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=60, deadline=None)
def test_a_draft_has_all_but_four_bits_and_refining_gives_them(kind: str, count: int, seed: int) -> None:
    tensor = tensor_of("BF16", Encoding.BF16_3, count)
    data = made_of(kind, tensor.size_bytes, seed)
    parts = store("BF16", Encoding.BF16_3, data)
    out = np.full_like(data, 0xA5)
    decode(tensor, parts, Tier.DRAFT, out)
    assert np.array_equal(out.view("<u2"), data.view("<u2") & 0xFFF0 | 0b1000)
    decode(tensor, parts, Tier.REFINE, out)
    assert np.array_equal(out, data)


@st.composite
def segments_around_batches(draw: st.DrawFn) -> tuple[str, Encoding, int]:
    """A dtype, its encoding, and a count of elements next to where a batch or one of its frames ends."""
    dtype, encoding = draw(
        st.sampled_from(
            [("BF16", Encoding.BF16_3)] * 3
            + [(dtype, Encoding.BYTES) for dtype in ("I8", "BF16", "F32", "F64")]
        )
    )
    planes = DTYPE_BITS[dtype] // 8 if encoding is Encoding.BYTES else 1
    frames_a_batch = codec._MAX_BATCH_FRAMES // planes
    frames = draw(st.integers(1, 2)) * frames_a_batch + draw(st.integers(-1, 1))
    return dtype, encoding, max(1, frames * FRAME_ELEMENTS + draw(st.sampled_from([-2, -1, 0, 1, 2, 1000])))


@given(
    segment=segments_around_batches(),
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=40, deadline=None)
def test_every_bit_comes_back_where_batches_end(
    segment: tuple[str, Encoding, int], kind: str, seed: int
) -> None:
    dtype, encoding, count = segment
    tensor = tensor_of(dtype, encoding, count)
    data = made_of(kind, tensor.size_bytes, seed)
    parts = store(dtype, encoding, data)
    slab = np.full(data.size + 128, 0xEE, np.uint8)
    scratch = codec.Scratch()
    for tier in parts:
        decode(tensor, parts, tier, slab[64:-64], scratch)
    assert np.array_equal(slab[64:-64], data)
    assert set(slab[:64]) | set(slab[-64:]) == {0xEE}


def test_what_a_batch_leaves_behind_does_not_reach_the_next() -> None:
    scratch = codec.Scratch()
    for count in (9 * FRAME_ELEMENTS + 5, 3, FRAME_ELEMENTS, 1, 2 * FRAME_ELEMENTS + 1):
        tensor = tensor_of("BF16", Encoding.BF16_3, count)
        data = made_of("weights", tensor.size_bytes, count)
        parts = store("BF16", Encoding.BF16_3, data)
        out = np.zeros_like(data)
        for tier in Tier:
            decode(tensor, parts, tier, out, scratch)
        assert np.array_equal(out, data)


def test_a_thread_works_in_less_than_4_mib() -> None:
    scratch = codec.Scratch()
    assert scratch.planes.nbytes + scratch.words.nbytes < 4 << 20


def test_all_bit_patterns_of_bf16_come_back() -> None:
    data = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    parts = store("BF16", Encoding.BF16_3, data)
    out = np.zeros_like(data)
    tensor = tensor_of("BF16", Encoding.BF16_3, 1 << 16)
    decode(tensor, parts, Tier.DRAFT, out)
    decode(tensor, parts, Tier.REFINE, out)
    assert np.array_equal(out, data)


def test_refining_twice_changes_nothing() -> None:
    tensor = tensor_of("BF16", Encoding.BF16_3, 5000)
    data = made_of("weights", tensor.size_bytes, 1)
    parts = store("BF16", Encoding.BF16_3, data)
    out = np.zeros_like(data)
    for tier in (Tier.DRAFT, Tier.REFINE, Tier.REFINE):
        decode(tensor, parts, tier, out)
    assert np.array_equal(out, data)


def test_the_bits_of_bf16_stand_where_the_format_says() -> None:
    # Sign, exponent and mantissa of three elements.
    data = words(0b1_10000001_1010110, 0b0_01111111_0111001, 0b1_00000000_1111111)
    planes = codec.encode_segment("BF16", Encoding.BF16_3, data)
    exponents, top_nibbles = (bytes(stored) for _, stored in planes[Tier.DRAFT])
    assert exponents == bytes([0b10000001, 0b01111111, 0b00000000])
    # Two bytes for three elements: byte 0 holds elements 0 and 2, byte 1 holds element 1.
    assert top_nibbles == bytes([0b1111_1101, 0b0000_0011])
    assert [bytes(stored) for _, stored in planes[Tier.REFINE]] == [bytes([0b1111_0110, 0b0000_1001])]


def test_nibbles_are_split_in_half_within_each_frame() -> None:
    elements = np.zeros(FRAME_ELEMENTS + 3, "<u2")
    elements[[0, 32_767, 32_768, 65_535, 65_536, 65_538]] = range(1, 7)
    _, nibbles = codec._split_bf16(elements)[1:]
    marked = {int(place): int(nibbles[place]) for place in np.flatnonzero(nibbles)}
    assert marked == {0: 0x31, 32_767: 0x42, 32_768: 0x65}


def test_byte_planes_stand_little_end_first() -> None:
    planes = codec.encode_segment("I32", Encoding.BYTES, np.array([0x04030201], "<i4").view(np.uint8))
    assert [bytes(stored) for _, stored in planes[Tier.DRAFT]] == [b"\1", b"\2", b"\3", b"\4"]


@pytest.mark.parametrize(
    ("dtype", "encoding", "count"),
    [("BF16", Encoding.BF16_3, 70_001), ("F32", Encoding.BYTES, 999), ("F16", Encoding.WHOLE, 3)],
)
def test_raw_planes_have_exactly_their_decoded_size(dtype: str, encoding: Encoding, count: int) -> None:
    tensor = tensor_of(dtype, encoding, count)
    for tier, coded in codec.encode_segment(dtype, encoding, made_of("noise", tensor.size_bytes, 0)).items():
        sizes = decoded_plane_bytes(encoding, tier, tensor.element_bytes, count)
        assert [plane_codec for plane_codec, _ in coded] == [Codec.RAW] * len(sizes)
        assert tuple(len(stored) for _, stored in coded) == sizes
        assert plane_count(encoding, tier, tensor.element_bytes) == len(sizes)


def test_no_encoding_but_bf16_3_has_anything_to_refine() -> None:
    assert [plane_count(encoding, Tier.REFINE, 2) for encoding in Encoding] == [0, 0, 1]


@given(kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]), count=COUNTS)
@settings(max_examples=30, deadline=None)
def test_a_coded_plane_is_aligned_and_smaller_than_a_raw_one(kind: str, count: int) -> None:
    for tier, coded in codec.encode_segment("BF16", Encoding.BF16_3, made_of(kind, 2 * count, 7)).items():
        sizes = decoded_plane_bytes(Encoding.BF16_3, tier, 2, count)
        for (plane_codec, stored), decoded_bytes in zip(coded, sizes, strict=True):
            if plane_codec is Codec.ZSTD:
                assert len(stored) % 8 == 0
                assert len(stored) < decoded_bytes


def test_weights_take_two_thirds_and_their_draft_four_tenths() -> None:
    count = 4 * FRAME_ELEMENTS
    coded = codec.encode_segment("BF16", Encoding.BF16_3, made_of("weights", 2 * count, 3))
    draft_bytes, refine_bytes = (sum(len(stored) for _, stored in coded[tier]) for tier in Tier)
    assert draft_bytes < 0.43 * 2 * count
    assert draft_bytes + refine_bytes < 0.68 * 2 * count


def test_matches_are_used_where_they_pay() -> None:
    positions = np.arange(100_000, dtype="<i8").view(np.uint8)
    coded = codec.encode_segment("I64", Encoding.BYTES, positions)[Tier.DRAFT]
    assert sum(len(stored) for _, stored in coded) < len(positions) // 100


@pytest.mark.parametrize(
    ("dtype", "shape", "encoding"),
    [
        ("BF16", (32, 32), Encoding.BF16_3),
        ("BF16", (4, 8, 32), Encoding.BF16_3),
        ("BF16", (31, 33), Encoding.WHOLE),
        ("BF16", (4096,), Encoding.WHOLE),
        ("BF16", (), Encoding.WHOLE),
        ("BF16", (0, 4096), Encoding.WHOLE),
        ("F32", (1000,), Encoding.WHOLE),
        ("F32", (10, 10), Encoding.BYTES),
        ("I8", (10, 10), Encoding.BYTES),
        ("F4", (10, 10), Encoding.BYTES),
    ],
)
def test_the_encoding_follows_dtype_and_shape(dtype: str, shape: tuple[int, ...], encoding: Encoding) -> None:
    assert codec.choose_encoding(dtype, shape) is encoding


def test_threads_decode_at_the_same_time_without_disturbing_each_other() -> None:
    tensor = tensor_of("BF16", Encoding.BF16_3, 5 * FRAME_ELEMENTS + 1)
    originals = [made_of("weights", tensor.size_bytes, seed) for seed in range(4)]
    outs = [np.zeros_like(data) for data in originals]

    def work(data: np.ndarray, out: np.ndarray) -> None:
        scratch = codec.Scratch()
        for _ in range(5):
            parts = store("BF16", Encoding.BF16_3, data)
            decode(tensor, parts, Tier.DRAFT, out, scratch)
            decode(tensor, parts, Tier.REFINE, out, scratch)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(originals, outs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(out, data) for out, data in zip(outs, originals, strict=True))


def test_decoding_writes_nothing_outside_its_segment() -> None:
    tensor = tensor_of("BF16", Encoding.BF16_3, 1001)
    data = made_of("weights", tensor.size_bytes, 5)
    parts = store("BF16", Encoding.BF16_3, data)
    slab = np.full(tensor.size_bytes + 128, 0xEE, np.uint8)
    for tier in Tier:
        decode(tensor, parts, tier, slab[64:-64])
    assert np.array_equal(slab[64:-64], data)
    assert set(slab[:64]) | set(slab[-64:]) == {0xEE}
