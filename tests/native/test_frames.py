"""Frames are decoded to what libzstd decodes them to, and damaged ones are refused, on each instruction
set.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import ISAS, decoded_by

from teneral.loader.errors import IntegrityError
from teneral.loader.format import zstd
from teneral.loader.native.frames import decode_frames, encode_frames, find_frames

GUARD_BYTES = 64
SIZES = (1, 5, 6, 63, 255, 256, 300, 1023, 5000, zstd.MAX_FRAME_BYTES)
RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK = 0, 1, 2
RAW, RLE, COMPRESSED, TREELESS = range(4)

Block = tuple[int, int, bytes]  # type, size that the header states, what is stored


@pytest.fixture(params=ISAS, scope="module", autouse=True)
def library_of(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decode by the library of one instruction set."""
    with decoded_by(request.param):
        yield


# Frames


def contents(seed: int) -> Iterator[bytes]:
    """Content with all kinds of symbols and repetitions."""
    rng = np.random.default_rng(seed)
    for size in SIZES:
        yield rng.normal(120, 2, size).astype(np.uint8).tobytes()
        yield rng.normal(120, 0.3, size).astype(np.uint8).tobytes()
        yield np.minimum(rng.geometric(0.6, size), 255).astype(np.uint8).tobytes()
        yield rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        words = [rng.integers(97, 110, length, dtype=np.uint8).tobytes() for length in range(2, 20)]
        yield b"".join(words[place] for place in rng.integers(0, len(words), size))[:size]
        yield bytes([7]) * size


def compressors() -> list[zstandard.ZstdCompressor]:
    parameters = zstandard.ZstdCompressionParameters
    levels = [parameters.from_level(level, window_log=16) for level in (*range(1, 20), *range(-5, 0))]
    literals = [
        parameters(strategy=strategy, window_log=16, hash_log=6, chain_log=6, search_log=1, min_match=6)
        for strategy in (zstandard.STRATEGY_FAST, zstandard.STRATEGY_BTOPT)
    ]
    return [zstandard.ZstdCompressor(compression_params=each) for each in (*levels, *literals)]


def in_blocks(compressor: zstandard.ZstdCompressor, content: bytes, num_blocks: int) -> list[Block]:
    """The blocks of a frame that is flushed a few times, so that blocks refer to those before them."""
    stream, coded = compressor.compressobj(size=len(content)), b""
    step = -(-len(content) // num_blocks)
    for start in range(0, len(content), step):
        coded += stream.compress(content[start : start + step])
        if start + step < len(content):
            coded += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return list(blocks_of(coded + stream.flush()))


def blocks_of(frame: bytes) -> Iterator[Block]:
    at = zstandard.frame_header_size(frame)
    while True:
        header = int.from_bytes(frame[at : at + 3], "little")
        stored = 1 if header >> 1 & 3 == RLE_BLOCK else header >> 3
        yield header >> 1 & 3, header >> 3, frame[at + 3 : at + 3 + stored]
        at += 3 + stored
        if header & 1:
            return


def frame_of(blocks: list[Block], size_bytes: int) -> bytes:
    frame = struct.pack("<IBI", 0xFD2FB528, 0b1010_0000, size_bytes)
    for number, (kind, size, stored) in enumerate(blocks):
        header = size << 3 | kind << 1 | (number == len(blocks) - 1)
        frame += header.to_bytes(3, "little") + stored
    return frame


def kinds_of(block: Block) -> set[tuple[str, int]]:
    """What the block makes use of, by RFC 8878, section 3.1.1."""
    kind, _, stored = block
    if kind != COMPRESSED_BLOCK:
        return {("block", kind)}
    literals, form = stored[0] & 3, stored[0] >> 2 & 3
    if literals in (RAW, RLE):
        head = (1, 2, 1, 3)[form]
        size = int.from_bytes(stored[:head], "little") >> (3 if head == 1 else 4)
        at = head + (size if literals == RAW else 1)
        kinds = {("literals", literals)}
    else:
        head, bits = (3, 3, 4, 5)[form], (10, 10, 14, 18)[form]
        at = head + (int.from_bytes(stored[:head], "little") >> 4 + bits)
        kinds = {("literals", literals), ("form of streams", form)}
        if literals == COMPRESSED:
            kinds |= {("weights as they are", int(stored[head] > 127))}
    many = stored[at]
    head = 1 if many < 128 else 2 if many < 255 else 3
    if not many:
        return kinds | {("bytes of the number of sequences", 0)}
    modes = stored[at + head]
    kinds |= {(name, modes >> shift & 3) for name, shift in (("lengths", 6), ("offsets", 4), ("matches", 2))}
    return kinds | {("bytes of the number of sequences", head)}


def padded(frame: bytes) -> bytes:
    missing = -len(frame) % 8
    return frame + (struct.pack("<II", 0x184D2A50, missing) + bytes(missing) if missing else b"")


# Decoders


def decoded(frame: bytes, size_bytes: int) -> bytes | None:
    """What the native core makes of a frame; None where it refuses it. Checks that nothing else is
    written.
    """
    memory = np.full(size_bytes + 2 * GUARD_BYTES, 0xEE, np.uint8)
    content = memory[GUARD_BYTES:-GUARD_BYTES]
    try:
        decode_frames(memoryview(padded(frame)), content, size_bytes)
    except IntegrityError:
        return None
    finally:
        assert set(memory[:GUARD_BYTES]) | set(memory[-GUARD_BYTES:]) == {0xEE}
    return content.tobytes()


def decoded_by_libzstd(frame: bytes, size_bytes: int) -> bytes | None:
    try:
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes)
    except zstandard.ZstdError:
        return None
    return content if len(content) == size_bytes else None


def check_against_libzstd(frame: bytes, size_bytes: int) -> bool:
    """True if libzstd decodes what is refused here: streams of literals that go on, or lack bits."""
    expected, content = decoded_by_libzstd(frame, size_bytes), decoded(frame, size_bytes)
    assert content in (None, expected)
    return content != expected


# Tests


def test_frames_of_all_levels_and_kinds_decode_to_their_content() -> None:
    kinds: set[tuple[str, int]] = set()
    all_compressors = compressors()
    for number, content in enumerate((*contents(0), *contents(1))):
        for place, compressor in enumerate(all_compressors[number % 2 :: 2]):
            blocks = in_blocks(compressor, content, (1, 2, 5)[place % 3])
            assert decoded(frame_of(blocks, len(content)), len(content)) == content
            kinds.update(*map(kinds_of, blocks))
    expected = {("block", RAW_BLOCK), ("block", RLE_BLOCK)}
    expected |= {("literals", literals) for literals in (RAW, COMPRESSED, TREELESS)}
    expected |= {("form of streams", form) for form in range(4)} | {
        ("weights as they are", is_so) for is_so in (0, 1)
    }
    expected |= {("bytes of the number of sequences", number) for number in range(3)}
    expected |= {(name, mode) for name in ("lengths", "offsets", "matches") for mode in range(4)}
    assert expected <= kinds


@pytest.mark.parametrize("form", [0b001, 0b101, 0b1101])
def test_literals_that_repeat_one_byte(form: int) -> None:
    head, shift = {0b001: (1, 3), 0b101: (2, 4), 0b1101: (3, 4)}[form]
    block = (30 << shift | form).to_bytes(head, "little") + b"x\0"
    frame = frame_of([(COMPRESSED_BLOCK, len(block), block)], 30)
    assert decoded(frame, 30) == decoded_by_libzstd(frame, 30) == b"x" * 30


@pytest.mark.parametrize("size_bytes", [900, 16_383, 16_384, 65_536])
@pytest.mark.parametrize("width", [0.5, 2, 10, 30, 80])
def test_short_and_long_codes_decode_to_their_content(size_bytes: int, width: float) -> None:
    """Few literals and long codes have a table of single symbols, the others one of several."""
    content = np.random.default_rng(5).normal(120, width, size_bytes).astype(np.uint8).tobytes()
    for num_blocks in (1, 3):  # further blocks may have the first one's codes
        for compressor in (*compressors()[-4:], zstandard.ZstdCompressor(level=1)):
            frame = frame_of(in_blocks(compressor, content, num_blocks), size_bytes)
            assert decoded(frame, size_bytes) == content


def test_each_flipped_bit_of_small_frames() -> None:
    rng = np.random.default_rng(1)
    exponents = rng.normal(120, 2, 300).astype(np.uint8).tobytes()
    words = b"".join(bytes([97 + place % 7]) * 3 + b"some words" for place in rng.integers(0, 99, 20))
    stricter = 0
    for content, num_blocks in ((exponents, 1), (exponents, 2), (words, 2)):
        blocks = in_blocks(zstandard.ZstdCompressor(level=1), content, num_blocks)
        frame = frame_of(blocks, len(content))
        for bit in range(8 * 9, 8 * len(frame)):  # behind the header
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            stricter += check_against_libzstd(bytes(flipped), len(content))
    assert stricter > 0  # else libzstd is as strict


@pytest.mark.parametrize("size_bytes", [300, 5000])
def test_frames_cut_off_anywhere_are_refused(size_bytes: int) -> None:
    content = np.random.default_rng(2).normal(120, 2, size_bytes).astype(np.uint8).tobytes()
    (block,) = in_blocks(zstandard.ZstdCompressor(level=1), content, 1)
    for stored in range(len(block[2])):
        assert (
            decoded(frame_of([(COMPRESSED_BLOCK, stored, block[2][:stored])], size_bytes), size_bytes) is None
        )


CORPUS = [
    (len(content), in_blocks(compressor, content, 1 + number % 3))
    for number, (content, compressor) in enumerate(
        (content, compressor) for content in contents(3) for compressor in compressors()[::7]
        if len(content) <= 5000
    )
]  # fmt: skip


def changed(stored: bytes, rng: random.Random) -> bytes:
    """A few bits flipped, bytes replaced, removed or repeated, most of them where headers and tables are."""
    changed = bytearray(stored)
    for _ in range(rng.choice([1, 1, 2, 5])):
        zone = min(len(changed), rng.choice([8, 30, 100, 5000]))
        at = rng.randrange(zone) if zone else 0
        match rng.randrange(6):
            case 0 | 1 if zone:
                changed[at] ^= 1 << rng.randrange(8)
            case 2 if zone:
                changed[-1 - at] ^= 1 << rng.randrange(8)
            case 3 if zone:
                changed[at] = rng.randrange(256)
            case 4:
                del changed[at : at + rng.randrange(1, 20)]
            case _:
                other = rng.choice(rng.choice(CORPUS)[1])[2]
                begin = rng.randrange(len(other) + 1)
                changed[at : at + rng.randrange(40)] = other[begin : begin + rng.randrange(40)]
    return bytes(changed)


@settings(max_examples=400, deadline=None)
@given(which=st.integers(0, len(CORPUS) - 1), seed=st.integers(0, 1 << 32))
def test_changed_frames_are_refused_or_decode_as_libzstd_decodes_them(which: int, seed: int) -> None:
    rng = random.Random(seed)
    size_bytes, blocks = CORPUS[which]
    for _ in range(10):
        spoilt = list(blocks)
        place = rng.randrange(len(blocks))
        kind, size, stored = spoilt[place]
        stored = changed(stored, rng)
        spoilt[place] = (kind, size, stored[:1] or b"x") if kind == RLE_BLOCK else (kind, len(stored), stored)
        if rng.random() < 0.1:
            spoilt.insert(rng.randrange(len(spoilt) + 1), rng.choice(rng.choice(CORPUS)[1]))
        check_against_libzstd(frame_of(spoilt, size_bytes), size_bytes)


def test_a_damaged_frame_among_others_is_named() -> None:
    content = np.random.default_rng(4).normal(120, 2, 3000).astype(np.uint8).tobytes()
    coded = bytearray(zstd.compress_frames(content, 1000, huf=True))
    second = coded.index(struct.pack("<I", 0xFD2FB528), 4)
    coded[second + 20 : second + 40] = bytes(20)
    with pytest.raises(
        IntegrityError, match=f"^tensor 'w': the zstd frame at byte {second} cannot be decoded$"
    ):
        decode_frames(memoryview(coded), np.empty(3000, np.uint8), 1000, where="tensor 'w'")


@pytest.mark.parametrize("longest", [2, 10, 11, 12])
def test_codes_of_more_than_eleven_bits_are_refused_as_the_rfc_says(longest: int) -> None:
    weights = [1, *range(1, longest), 0]  # of the symbol after them follows a code of one bit
    tree = bytes(high << 4 | low for high, low in zip(weights[::2], weights[1::2], strict=False))
    literals = bytes([127 + longest]) + tree + b"\xff\xff\xff\x01"  # ones, and one that marks the begin
    block = (len(literals) << 14 | 24 << 4 | COMPRESSED).to_bytes(3, "little") + literals + b"\0"
    frame = frame_of([(COMPRESSED_BLOCK, len(block), block)], 24)
    assert decoded_by_libzstd(frame, 24) == bytes([longest]) * 24
    assert decoded(frame, 24) == (None if longest > 11 else bytes([longest]) * 24)


# Frames that are made here


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    size_bytes=st.one_of(st.integers(1, 3000), st.sampled_from([65_535, 65_536, 65_537, 200_000])),
    kind=st.sampled_from(["noise", "weights", "few", "one", "rare", "powers", "steep"]),
    frame_bytes=st.sampled_from([1, 37, 255, 256, 1000, 16_384, 65_536]),
)
def test_frames_that_are_made_here_are_decoded_by_libzstd_and_here(
    seed: int, size_bytes: int, kind: str, frame_bytes: int
) -> None:
    if frame_bytes < 37:
        size_bytes = min(size_bytes, 500)
    rng = np.random.default_rng(seed)
    content = {
        "noise": lambda: rng.integers(0, 256, size_bytes),
        "weights": lambda: rng.normal(120, rng.uniform(0.3, 60), size_bytes).clip(0, 255),
        "few": lambda: rng.choice([3, 250], size_bytes, p=[0.9, 0.1]),
        "one": lambda: np.full(size_bytes, 9),
        "rare": lambda: np.where(rng.random(size_bytes) < 0.999, 0, rng.integers(0, 256, size_bytes)),
        # The deepest trees: each symbol is about as frequent as all rarer ones together.
        "powers": lambda: rng.permutation(np.repeat(np.arange(24), (1.618 ** np.arange(24)).astype(int)))[
            :size_bytes
        ],
        "steep": lambda: 255 * rng.random(size_bytes) ** rng.uniform(1, 40),
    }[kind]().astype(np.uint8)
    coded = bytes(encode_frames(content, frame_bytes))
    for begin, end in find_frames(coded, content.size, frame_bytes).tolist():
        assert begin % 8 == 0
        header = zstandard.get_frame_parameters(coded[begin:end])
        assert header.content_size == header.window_size <= frame_bytes
    reader = zstandard.ZstdDecompressor().stream_reader(coded, read_across_frames=True)
    assert reader.read(content.size + 1) == content.tobytes()
    out = np.empty_like(content)
    decode_frames(coded, out, frame_bytes)
    assert np.array_equal(out, content)
    assert len(coded) <= content.size + -(-content.size // frame_bytes) * 32


def test_frames_are_the_same_on_every_instruction_set() -> None:
    content = np.random.default_rng(6).normal(120, 3, 300_000).astype(np.uint8)
    digest = blake3(encode_frames(content, 65_536)).hexdigest()
    assert digest == "cae1b41a65e77f54daa119c0456cadd5bcb3d0ef13e8d5878e37c66b80faa21c"
