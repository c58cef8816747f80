"""Elements ↔ planes: every bit comes back, tier by tier, as `docs/format.md` lays it out."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import coarse

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
from teneral.loader.native.split import Cut, split

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
    scratch: Scratch | None = None,
) -> None:
    stored, planes = parts[tier]
    segment = Segment(0, 0, tensor.num_elements, planes)
    decode_planes(tensor, segment, tier, stored, out, scratch or Scratch())


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


FLOATS = {"bf16": ("BF16", 7), "f16": ("F16", 10), "f32": ("F32", 23)}  # dtype and mantissa bits
FLOAT_ENCODINGS = [
    f"{family}.{bits}"
    for family, (_, mantissa_bits) in FLOATS.items()
    for draft in range(mantissa_bits + 1)
    for bits in (f"{draft}", *(f"{sketch}.{draft}" for sketch in range(draft)))
]


def float_encoding(name: str) -> tuple[str, Encoding, dict[Tier, int]]:
    """The dtype, the encoding, and the mantissa bits that each of its tiers knows, from the name alone."""
    family, *numbers = name.split(".")
    dtype, mantissa_bits = FLOATS[family]
    known = dict(zip((Tier.SKETCH, Tier.DRAFT)[-len(numbers) :], map(int, numbers), strict=True))
    if known[Tier.DRAFT] < mantissa_bits:
        known[Tier.REFINE] = mantissa_bits
    found = Encoding.find(name)
    assert found is not None
    return dtype, found, known


def check_tiers(name: str, data: np.ndarray) -> None:
    """Each tier, decoded once or twice, gives truncated floats with the midpoint below; the last one every bit."""
    dtype, encoding, known = float_encoding(name)
    tensor = tensor_of(dtype, encoding, data.size * 8 // DTYPE_BITS[dtype])
    parts = store(dtype, encoding, data)
    assert list(parts) == list(known)
    out, scratch = np.full_like(data, 0xA5), Scratch()
    for tier, bits in known.items():
        for _ in range(2):
            decode(tensor, parts, tier, out, scratch)
            assert np.array_equal(out, coarse(dtype, bits, data)), tier
    assert np.array_equal(out, data)


@given(
    name=st.sampled_from(FLOAT_ENCODINGS),
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    count=COUNTS,
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=150, deadline=None)
def test_each_tier_has_the_bits_that_its_encoding_says_and_the_last_one_all(
    name: str, kind: str, count: int, seed: int
) -> None:
    dtype, _, _ = float_encoding(name)
    check_tiers(name, made_of(kind, count * DTYPE_BITS[dtype] // 8, seed))


@pytest.mark.parametrize("name", FLOAT_ENCODINGS)
def test_every_encoding_of_floats_gives_every_bit_back(name: str) -> None:
    dtype, _, _ = float_encoding(name)
    check_tiers(name, made_of("noise", 1003 * DTYPE_BITS[dtype] // 8, 3))


@pytest.mark.parametrize(
    "name", [*(name for name in FLOAT_ENCODINGS if name.startswith("bf16")), "f16.3", "f16.1.9"]
)
def test_all_bit_patterns_of_16_bits_come_back(name: str) -> None:
    check_tiers(name, np.arange(1 << 16, dtype="<u2").view(np.uint8))


@pytest.mark.parametrize("name", ["f32.0", "f32.7", "f32.1.7", "f32.22", "f32.3.23"])
def test_infinities_payloads_of_nan_and_denormals_of_fp32_come_back(name: str) -> None:
    patterns = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x3F800000]
    words = np.array([pattern | sign for pattern in patterns for sign in (0, 1 << 31)], "<u4")
    check_tiers(name, words.view(np.uint8))


def test_there_is_one_object_of_each_encoding_whatever_way_it_came() -> None:
    for name in (*FLOAT_ENCODINGS, "whole", "bytes", "whole.sketch", "bytes.sketch"):
        found = Encoding.find(name)
        assert found is not None
        assert found.value == name
        assert Encoding.find(name) is pickle.loads(pickle.dumps(found)) is found
    assert Encoding.find("bf16.3") is Encoding.BF16_3


@pytest.mark.parametrize(
    "name",
    ["", "whole.draft", "bytes.0", "bf16", "bf16.", "bf16.8", "bf16.3.3", "bf16.4.3", "bf16.03", "bf16.1.2.3",
     "f16.11", "f32.24", "f32.99", "f32.1.24", "f64.3", "BF16.3", "bf16.3 ", "bf16.3\n", "bf16.\u0663", "bf16.-1"],
)  # fmt: skip
def test_there_is_no_encoding_called(name: str) -> None:
    assert Encoding.find(name) is None


# Of random bits, so of planes that stay raw: BLAKE3 over the planes of draft and refine as the first writer made them.
FIRST_WRITERS_PLANES = {
    1: "8c029a13cdcf6be88b9b0871862508eafe36e36f887fb76ebfb6909332bc00d9",
    2: "47bfdea2158ca369e5bce023d2a6597f8a0162aa76bdf156a7adc53197260032",
    3: "b8ba6dccdeafbdfeb38919a6d1521d892f7c99ee26c850b30c43fc73503d29f8",
    70_001: "77c2c34822b51d5ebbc1c22251e75b439bb9e9431242e30419560ada15e2fdb6",
    131_073: "fe829f5f7886371ed47aaf5dbfaefd78201eae33d9fdb66bb2bd8a794c9b1285",
}


def test_the_planes_of_bf16_3_are_those_of_the_first_writer() -> None:
    rng = np.random.default_rng(11)
    for count, digest in FIRST_WRITERS_PLANES.items():
        coded = codec.encode_segment("BF16", Encoding.BF16_3, rng.integers(0, 256, 2 * count, dtype=np.uint8))
        assert list(coded) == [Tier.DRAFT, Tier.REFINE]
        written = blake3()
        for plane_codec, stored in (plane for planes in coded.values() for plane in planes):
            assert plane_codec is Codec.RAW
            written.update(bytes(stored))
        assert written.hexdigest() == digest


@st.composite
def segments_around_frames(draw: st.DrawFn) -> tuple[str, Encoding, int]:
    """A dtype, its encoding, and a count of elements next to where a frame, or a batch of the packer, ends."""
    dtype, encoding = draw(
        st.sampled_from(
            [("BF16", Encoding.BF16_3)] * 2
            + [("BF16", Encoding.of_float("BF16", 6)), ("F16", Encoding.of_float("F16", 10, 2))]
            + [("F32", Encoding.of_float("F32", 23, 7)), ("F32", Encoding.of_float("F32", 6))]
            + [(dtype, Encoding.BYTES) for dtype in ("I8", "BF16", "F32", "F64")]
        )
    )
    frames = draw(st.sampled_from([0, 1, 2, 7, 8, 9]))
    return dtype, encoding, max(1, frames * FRAME_ELEMENTS + draw(st.sampled_from([-2, -1, 0, 1, 2, 1000])))


@given(
    segment=segments_around_frames(),
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=40, deadline=None)
def test_every_bit_comes_back_where_frames_end(
    segment: tuple[str, Encoding, int], kind: str, seed: int
) -> None:
    dtype, encoding, count = segment
    tensor = tensor_of(dtype, encoding, count)
    data = made_of(kind, tensor.size_bytes, seed)
    parts = store(dtype, encoding, data)
    slab = np.full(data.size + 128, 0xEE, np.uint8)
    scratch = Scratch()
    for tier in parts:
        decode(tensor, parts, tier, slab[64:-64], scratch)
    assert np.array_equal(slab[64:-64], data)
    assert set(slab[:64]) | set(slab[-64:]) == {0xEE}


def test_what_a_segment_leaves_behind_does_not_reach_the_next() -> None:
    scratch = Scratch()
    for count in (9 * FRAME_ELEMENTS + 5, 3, FRAME_ELEMENTS, 1, 2 * FRAME_ELEMENTS + 1):
        tensor = tensor_of("BF16", Encoding.BF16_3, count)
        data = made_of("weights", tensor.size_bytes, count)
        parts = store("BF16", Encoding.BF16_3, data)
        out = np.zeros_like(data)
        for tier in parts:
            decode(tensor, parts, tier, out, scratch)
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


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (4, {0: 1, 32_767: 2, 32_768: 3, 65_535: 4}, {0: 0x31, 32_767: 0x42}),
        (2, {0: 1, 16_383: 2, 16_384: 3, 65_535: 1}, {0: 0b1101, 16_383: 0b01_00_00_10}),
        (1, {0: 1, 8_191: 1, 8_192: 1, 65_535: 1}, {0: 0b0000_0011, 8_191: 0b1000_0001}),
    ],
)
def test_elements_share_bytes_at_a_distance_within_each_frame(
    bits: int, values: dict[int, int], expected: dict[int, int]
) -> None:
    elements = np.zeros(2 * FRAME_ELEMENTS, "<u2")
    frame_bytes = FRAME_ELEMENTS * bits // 8
    for place, value in values.items():
        elements[[place, FRAME_ELEMENTS + place]] = value
    (packed,) = split(elements, [Cut(bits, 0, (1 << bits) - 1)])
    assert packed.size == 2 * frame_bytes
    assert np.array_equal(packed[:frame_bytes], packed[frame_bytes:])
    assert {int(place): int(packed[place]) for place in np.flatnonzero(packed[:frame_bytes])} == expected


def test_a_shorter_frame_has_its_own_distance() -> None:
    (packed,) = split(np.array([1, 2, 3, 1, 2], "<u2"), [Cut(2, 0, 3)])
    assert packed.tolist() == [0b00_10_11_01, 0b00_00_01_10]  # elements 0, 2, 4 and 1, 3


def test_a_field_of_seven_bits_is_planes_of_four_two_and_one() -> None:
    data = words(0b0_00000000_1011011)
    planes = codec.encode_segment("BF16", Encoding.of_float("BF16", 0), data)
    assert [bytes(stored) for _, stored in planes[Tier.DRAFT]] == [b"\0", b"\0"]
    assert [bytes(stored) for _, stored in planes[Tier.REFINE]] == [b"\x0b", b"\x01", b"\x01"]


def test_a_long_field_begins_with_whole_bytes() -> None:
    data = np.array([0b1_10000000_101_10011001_11110000_0110], "<u4").view(np.uint8)
    planes = codec.encode_segment("F32", Encoding.of_float("F32", 3), data)
    assert [bytes(stored) for _, stored in planes[Tier.DRAFT]] == [b"\x80", b"\x0d"]
    assert [bytes(stored) for _, stored in planes[Tier.REFINE]] == [b"\x99", b"\xf0", b"\x06"]


def test_the_short_exponent_of_fp16_has_a_byte_of_its_own() -> None:
    planes = codec.encode_segment("F16", Encoding.of_float("F16", 3, 1), words(0b1_10101_1100000011))
    assert [bytes(stored) for _, stored in planes[Tier.SKETCH]] == [b"\x15", b"\x03"]
    assert [bytes(stored) for _, stored in planes[Tier.DRAFT]] == [b"\x02"]
    assert [bytes(stored) for _, stored in planes[Tier.REFINE]] == [b"\x00", b"\x01", b"\x01"]


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


def test_what_is_exact_in_its_draft_has_nothing_to_refine() -> None:
    for name in ("whole", "bytes", "bf16.7", "f16.10", "f32.23", "f32.7.23"):
        found = Encoding.find(name)
        assert found is not None
        assert Tier.REFINE not in found.tiers
        assert decoded_plane_bytes(found, Tier.REFINE, 4, 1, 1) == ()


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
    draft_bytes, refine_bytes = (sum(len(stored) for _, stored in planes) for planes in coded.values())
    assert draft_bytes < 0.43 * 2 * count
    assert draft_bytes + refine_bytes < 0.68 * 2 * count


@pytest.mark.parametrize("kind", ["weights", "repetitions", "zeros", "noise"])
def test_planes_in_room_that_was_used_before_are_the_same(kind: str) -> None:
    encoding = Encoding.of_float("BF16", 3, 1)
    data = made_of(kind, 2 * (FRAME_ELEMENTS + 7), 5)
    room = np.full(codec.encoding_room_bytes(encoding, data.size // 2), 0xA5, np.uint8)
    assert codec.encode_segment("BF16", encoding, data, room) == codec.encode_segment("BF16", encoding, data)


def test_matches_are_used_where_they_pay() -> None:
    positions = np.arange(100_000, dtype="<i8").view(np.uint8)
    coded = codec.encode_segment("I64", Encoding.BYTES, positions)[Tier.DRAFT]
    assert sum(len(stored) for _, stored in coded) < len(positions) // 100


@pytest.mark.parametrize(
    ("dtype", "shape", "plain", "sketched"),
    [
        ("BF16", (32, 32), "bf16.3", "bf16.1.3"),
        ("BF16", (4, 8, 32), "bf16.3", "bf16.1.3"),
        ("BF16", (31, 33), "whole", "whole.sketch"),
        ("BF16", (4096,), "whole", "whole.sketch"),
        ("BF16", (), "whole", "whole.sketch"),
        ("BF16", (0, 4096), "whole", "whole.sketch"),
        ("F16", (32, 32), "f16.3", "f16.1.3"),
        ("F16", (10, 10), "whole", "whole.sketch"),
        ("F32", (32, 32), "f32.7", "f32.1.7"),
        ("F32", (1000,), "whole", "whole.sketch"),
        ("F64", (32, 32), "bytes", "bytes.sketch"),
        ("F8_E4M3", (32, 32), "bytes", "bytes.sketch"),
        ("I8", (10, 10), "bytes", "bytes.sketch"),
        ("F4", (10, 10), "bytes", "bytes.sketch"),
    ],
)
def test_the_encoding_follows_dtype_and_shape(
    dtype: str, shape: tuple[int, ...], plain: str, sketched: str
) -> None:
    assert codec.choose_encoding(dtype, shape) is Encoding.find(plain)
    assert codec.choose_encoding(dtype, shape, sketch_bits=1) is Encoding.find(sketched)


def test_more_draft_bits_than_a_dtype_has_are_all_of_them() -> None:
    assert codec.choose_encoding("BF16", (32, 32), draft_bits=9) is Encoding.find("bf16.7")


def test_threads_decode_at_the_same_time_without_disturbing_each_other() -> None:
    tensor = tensor_of("BF16", Encoding.BF16_3, 5 * FRAME_ELEMENTS + 1)
    originals = [made_of("weights", tensor.size_bytes, seed) for seed in range(4)]
    outs = [np.zeros_like(data) for data in originals]

    def work(data: np.ndarray, out: np.ndarray) -> None:
        scratch = Scratch()
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
    for tier in parts:
        decode(tensor, parts, tier, slab[64:-64])
    assert np.array_equal(slab[64:-64], data)
    assert set(slab[:64]) | set(slab[-64:]) == {0xEE}
