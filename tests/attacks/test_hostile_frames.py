"""Planes that were made to hurt: bombs, lies about sizes, cut and swapped bytes.

A digest protects them, but the writer of a whole artifact writes its digests too.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import ISAS, decoded_by

from teneral.loader.errors import IntegrityError
from teneral.loader.format import zstd
from teneral.loader.format.fill import Scratch, decode_planes
from teneral.loader.format.manifest import FRAME_ELEMENTS, Codec, Encoding, Plane, Segment, Tensor, Tier
from teneral.loader.native.frames import decode_frames, find_frames

CONTENT = bytes(np.random.default_rng(0).normal(120, 3, 3000).astype(np.uint8))


@pytest.fixture(params=ISAS, scope="module", autouse=True)
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    with decoded_by(request.param):
        yield


def decoded(src: bytes, size_bytes: int = len(CONTENT), frame_bytes: int = 1000) -> bytes:
    """What the frames hold. Checks that nothing outside of it is written, and that stepping over them finds them."""
    memory = np.full(64 + size_bytes + 64, 0xEE, np.uint8)
    content = memory[64:-64]
    try:
        decode_frames(memoryview(src), content, frame_bytes)
    finally:
        assert set(memory[:64]) | set(memory[-64:]) == {0xEE}
    extents = find_frames(memoryview(src), size_bytes, frame_bytes).tolist()
    assert [begin for begin, _ in extents[1:]] == [
        -(-end // 8) * 8 + (8 if end % 8 else 0) for _, end in extents[:-1]
    ]
    return content.tobytes()


def aligned(frame: bytes) -> bytes:
    padding = -len(frame) % 8
    return frame + (struct.pack("<II", 0x184D2A50, padding) + bytes(padding) if padding else b"")


def frame_with(content: bytes, **parameters: object) -> bytes:
    """A frame by zstd itself, with other settings than the format's."""
    settings_ = zstandard.ZstdCompressionParameters.from_level(3, **parameters)
    return zstandard.ZstdCompressor(compression_params=settings_).compress(content)


def raw_block(content: bytes, *, last: bool = True) -> bytes:
    return struct.pack("<I", len(content) << 3 | last)[:3] + content


def handmade(*blocks: bytes, content_bytes: int, descriptor: int = 0b1010_0000) -> bytes:
    """A frame with a 4-byte content size and any blocks."""
    return aligned(struct.pack("<IBI", 0xFD2FB528, descriptor, content_bytes) + b"".join(blocks))


def test_the_handmade_frame_of_these_tests_is_right_when_left_alone() -> None:
    assert decoded(handmade(raw_block(b"abc"), content_bytes=3), 3) == b"abc"


ABC = handmade(raw_block(b"abc"), content_bytes=3)  # 15 bytes, 9 of padding
EMPTY = raw_block(b"", last=False)
BOMB = handmade(*[b"\x02\x00\x10\x00"] * 511, b"\x03\x00\x10\x00", content_bytes=64 << 20)  # 2 KB, 64 MiB

HOSTILE = {
    "declares a gibibyte": (handmade(raw_block(b"abc"), content_bytes=1 << 30), "declares another size"),
    "wants 64 MiB for 2 KB": (BOMB, "declares another size"),
    "declares a size of 8 bytes": (
        handmade(raw_block(b"abc"), content_bytes=3, descriptor=0b1110_0000), "declares"
    ),
    "declares no size": (aligned(frame_with(b"abc", write_content_size=False)), "no content size"),
    "has a checksum": (aligned(frame_with(b"abc", write_checksum=True)), "checksum"),
    "has a dictionary": (handmade(raw_block(b"abc"), content_bytes=3, descriptor=0b1010_0001), "dictionary"),
    "has a window": (handmade(b"\x58", raw_block(b"abc"), content_bytes=3, descriptor=0b1000_0000), "window"),
    "has a reserved bit": (handmade(raw_block(b"abc"), content_bytes=3, descriptor=0b1010_1000), "window"),
    "has an unused bit": (handmade(raw_block(b"abc"), content_bytes=3, descriptor=0b1011_0000), "window"),
    "has a reserved block": (handmade(b"\x1f\x00\x00abc", content_bytes=3), "unknown type"),
    "holds more than it declares": (handmade(raw_block(b"abcd"), content_bytes=3), "cannot be decoded"),
    "holds less than it declares": (handmade(raw_block(b"ab"), content_bytes=3), "cannot be decoded"),
    "repeats a byte too often": (handmade(b"\x03\x00\x08x", content_bytes=3), "cannot be decoded"),
    "never ends": (handmade(*[EMPTY] * 300, content_bytes=3), "too many blocks"),
    "has many empty blocks": (
        handmade(*[EMPTY] * 300, raw_block(b"abc"), content_bytes=3), "too many blocks"
    ),
    "holds noise": (handmade(b"\x25\x00\x00\xa0\xb1\xc2\xd3", content_bytes=3), "cannot be decoded"),
    "is a skippable frame": (struct.pack("<II", 0x184D2A50, 8) + bytes(8), "no zstd frame at byte 0"),
    "is a huge skippable frame": (struct.pack("<II", 0x184D2A50, 0xFFFFFFFF), "no zstd frame at byte 0"),
    "is followed by another": (ABC * 2, "24 bytes follow the last"),
    "is followed by zeros": (ABC + bytes(8), "8 bytes follow the last"),
    "is not padded": (ABC[:15], "end within"),
    "is padded by zeros": (ABC[:15] + bytes(9), "padding at byte 15"),
    "is padded by too much": (
        ABC[:15] + struct.pack("<II", 0x184D2A50, 9) + bytes(9), "padding at byte 15"
    ),
    "is padded by something": (ABC[:-1] + b"\x01", "padding at byte 15"),
    "is gzip": (b"\x1f\x8b\x08" + bytes(21), "no zstd frame at byte 0"),
    "is nothing": (b"", "end within"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_frame_is_refused_that(what: str) -> None:
    frame, message = HOSTILE[what]
    with pytest.raises(IntegrityError, match=message):
        decoded(frame, 3)


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("num_before", [1, 7])
def test_a_frame_behind_good_ones_is_refused_that(what: str, num_before: int) -> None:
    frame, message = HOSTILE[what]
    message = message.split(" at byte")[0]  # it is another byte here
    with pytest.raises(IntegrityError, match=message):
        decoded(ABC * num_before + frame, 3 * (num_before + 1), 3)


@pytest.mark.parametrize(
    "what", ["holds more than it declares", "holds less than it declares", "holds noise"]
)
def test_a_frame_before_good_ones_is_refused_that(what: str) -> None:
    with pytest.raises(IntegrityError, match="cannot be decoded"):
        decoded(HOSTILE[what][0] + ABC * 3, 12, 3)


def test_a_frame_may_not_make_up_for_a_shorter_one() -> None:
    longer = handmade(raw_block(b"abcd"), content_bytes=3)
    shorter = handmade(raw_block(b"ef"), content_bytes=3)
    for frames in (longer + shorter, shorter + longer):
        with pytest.raises(IntegrityError, match="cannot be decoded"):
            decoded(frames, 6, 3)


def test_damage_does_not_reach_what_is_decoded_next() -> None:
    for frame, _ in HOSTILE.values():
        with pytest.raises(IntegrityError):
            decoded(frame, 3)
        assert decoded(ABC * 5, 15, 3) == b"abc" * 5


def test_what_a_bomb_declares_is_never_allocated() -> None:
    assert zstandard.ZstdDecompressor().decompress(BOMB) == bytes(64 << 20)  # it is a real one
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="declares"):
            decoded(BOMB, 65_536, 65_536)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_a_bomb_that_declares_little_ends_at_what_it_declares() -> None:
    bomb = handmade(*[b"\x02\x00\x08\x00"] * 255, b"\x03\x00\x08\x00", content_bytes=65_536)  # 16 MiB
    with pytest.raises(IntegrityError, match="cannot be decoded"):
        decoded(bomb * 4, 4 * 65_536, 65_536)


def test_a_frame_may_not_end_in_the_next_one() -> None:
    coded = bytes(zstd.compress_frames(CONTENT, 1000, huf=True))
    first_end = coded.index(struct.pack("<I", 0xFD2FB528), 4)
    with pytest.raises(IntegrityError):
        decoded(coded[: first_end - 8] + coded[first_end:])


@pytest.mark.parametrize("huf", [False, True])
def test_frames_cut_off_anywhere_are_refused(huf: bool) -> None:
    coded = zstd.compress_frames(CONTENT, 1000, huf=huf)
    for end in range(len(coded)):
        with pytest.raises(IntegrityError):
            decoded(coded[:end])


@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    huf=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_changed_bytes_are_refused_or_give_content_of_the_right_size(
    changes: list[tuple[int, int]], huf: bool
) -> None:
    coded = bytearray(zstd.compress_frames(CONTENT, 1000, huf=huf))
    for place, value in changes:
        coded[place % len(coded)] = value
    try:
        content = decoded(bytes(coded))
    except IntegrityError:
        return
    assert len(content) == len(CONTENT)


@given(noise=st.binary(max_size=200), size_bytes=st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(noise: bytes, size_bytes: int) -> None:
    with pytest.raises(IntegrityError):
        decoded(noise, size_bytes, 100)


# Whole planes, as a hostile part would hold them


def refine(plane: Plane, stored: bytes, count: int) -> np.ndarray:
    tensor = Tensor(0, "w", "BF16", (count,), 0, Encoding.BF16_3, 0)
    out = np.zeros(2 * count, np.uint8)
    segment = Segment(0, 0, count, (plane,))
    decode_planes(tensor, segment, Tier.REFINE, memoryview(stored), out, Scratch())
    return out


def test_bits_in_the_unused_last_nibble_are_refused() -> None:
    assert refine(Plane(Codec.RAW, 0, 2), b"\x21\x03", 3).tolist() == [1, 0, 3, 0, 2, 0]
    with pytest.raises(IntegrityError, match="unused bits"):
        refine(Plane(Codec.RAW, 0, 2), b"\x21\x43", 3)


def test_bits_in_an_unused_nibble_behind_many_frames_are_refused() -> None:
    count = 9 * FRAME_ELEMENTS + 1
    stored = bytearray(-(-count // 2))
    assert not refine(Plane(Codec.RAW, 0, len(stored)), bytes(stored), count).any()
    stored[-1] = 0x10
    with pytest.raises(IntegrityError, match="unused bits"):
        refine(Plane(Codec.RAW, 0, len(stored)), bytes(stored), count)


@pytest.mark.parametrize("name", ["bf16.6", "bf16.5", "bf16.3", "f32.22", "f16.8"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 13, FRAME_ELEMENTS + 6, 9 * FRAME_ELEMENTS + 3])
def test_each_bit_that_is_nobodys_is_refused(name: str, count: int) -> None:
    encoding = Encoding.find(name)
    assert encoding is not None
    dtype = {"bf16": "BF16", "f16": "F16", "f32": "F32"}[name.partition(".")[0]]
    tensor = Tensor(0, "w", dtype, (count,), 0, encoding, 0)
    (bits,) = encoding.plane_bits(Tier.REFINE, tensor.element_bytes)
    rest = count % FRAME_ELEMENTS
    height = -(-rest // (8 // bits))
    stored = np.zeros(-(-count * bits // 8), np.uint8)
    segment = Segment(0, 0, count, (Plane(Codec.RAW, 0, stored.size),))

    def decode() -> None:
        out = np.zeros(tensor.size_bytes, np.uint8)
        decode_planes(tensor, segment, Tier.REFINE, stored.data, out, Scratch())

    decode()
    for index in range(height * 8 // bits):
        place = stored.size - height + index % height
        stored[place] = 1 << bits * (index // height)
        if index < rest:
            decode()
        else:
            with pytest.raises(IntegrityError, match="unused bits"):
                decode()
        stored[place] = 0


def test_an_exponent_of_fp16_with_more_than_five_bits_is_refused() -> None:
    encoding = Encoding.of_float("F16", 3)
    tensor = Tensor(0, "w", "F16", (2,), 0, encoding, 0)
    segment = Segment(0, 0, 2, (Plane(Codec.RAW, 0, 2), Plane(Codec.RAW, 2, 1)))
    out = np.zeros(4, np.uint8)
    decode_planes(tensor, segment, Tier.DRAFT, memoryview(b"\x1f\x1f\0"), out, Scratch())
    with pytest.raises(IntegrityError, match="an exponent has more than 5 bits"):
        decode_planes(tensor, segment, Tier.DRAFT, memoryview(b"\x1f\x20\0"), out, Scratch())


@pytest.mark.parametrize("size_bytes", [0, 1, 3])
def test_a_raw_plane_of_another_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(IntegrityError, match="a raw plane of 2 bytes was expected"):
        refine(Plane(Codec.RAW, 0, size_bytes), bytes(8), 3)


def test_a_plane_that_reaches_past_its_part_is_refused() -> None:
    with pytest.raises(IntegrityError, match="raw plane of 1"):
        refine(Plane(Codec.RAW, 7, 2), bytes(8), 3)
    with pytest.raises(IntegrityError, match="end within the zstd frame"):
        refine(Plane(Codec.ZSTD, 8, 16), bytes(8), 3)


def test_a_coded_whole_plane_is_refused() -> None:
    tensor = Tensor(0, "w", "F32", (2,), 0, Encoding.WHOLE, 0)
    segment = Segment(0, 0, 2, (Plane(Codec.ZSTD, 0, 8),))
    with pytest.raises(IntegrityError, match="a raw plane of 8 bytes was expected"):
        decode_planes(tensor, segment, Tier.DRAFT, memoryview(bytes(8)), np.zeros(8, np.uint8), Scratch())
