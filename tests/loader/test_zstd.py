"""Runs of frames: standard ones that any zstd reads, aligned, and cut where the format says."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import ISAS, decoded_by

from teneral.loader.errors import IntegrityError
from teneral.loader.format import zstd
from teneral.loader.native.frames import decode_frames, find_frames

FRAME_BYTES = st.sampled_from([1, 7, 1000, 32_768, zstd.MAX_FRAME_BYTES])
CONTENT = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=9), st.integers(0, 30_000)),
)


@pytest.fixture(params=ISAS, scope="module", autouse=True)
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    with decoded_by(request.param):
        yield


def join(src: bytes, size_bytes: int, frame_bytes: int) -> bytes:
    content = np.empty(size_bytes, np.uint8)
    decode_frames(memoryview(src), content, frame_bytes)
    return content.tobytes()


@given(content=CONTENT, frame_bytes=FRAME_BYTES, huf=st.booleans())
@settings(max_examples=100, deadline=None)
def test_frames_give_their_content_back_however_many_are_read_at_a_time(
    content: bytes, frame_bytes: int, huf: bool
) -> None:
    content = content[: 300 * frame_bytes]
    coded = zstd.compress_frames(content, frame_bytes, huf=huf)
    assert len(coded) % zstd.FRAME_ALIGNMENT_BYTES == 0
    assert join(coded, len(content), frame_bytes) == content


@given(content=CONTENT, frame_bytes=st.sampled_from([1000, zstd.MAX_FRAME_BYTES]), huf=st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_zstd_decoder_reads_them_as_one_stream(content: bytes, frame_bytes: int, huf: bool) -> None:
    coded = zstd.compress_frames(content, frame_bytes, huf=huf)
    with zstandard.ZstdDecompressor().stream_reader(coded, read_across_frames=True) as reader:
        assert reader.read() == content


@pytest.mark.parametrize("huf", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 255, 256, 257, 65_535, 65_536])
def test_a_frame_declares_its_size_and_nothing_else(size_bytes: int, huf: bool) -> None:
    content = np.random.default_rng(0).integers(0, 40, size_bytes, dtype=np.uint8)
    header = zstandard.get_frame_parameters(zstd.compress_frames(content.data, 65_536, huf=huf))
    assert (header.content_size, header.window_size) == (size_bytes, size_bytes)
    assert (header.has_checksum, header.dict_id) == (False, 0)


def test_frames_are_cut_at_the_same_number_of_bytes() -> None:
    coded = bytes(zstd.compress_frames(bytes(range(250)), 100, huf=True))
    pieces = coded.split(struct.pack("<I", 0xFD2FB528))[1:]
    sizes = [zstandard.frame_content_size(struct.pack("<I", 0xFD2FB528) + piece) for piece in pieces]
    assert sizes == [100, 100, 50]


def test_frames_that_do_not_belong_to_the_content_are_refused() -> None:
    coded = zstd.compress_frames(bytes(range(250)), 100, huf=True)
    with pytest.raises(IntegrityError, match="bytes follow the last zstd frame"):
        join(coded, 200, 100)


def test_frames_are_found_without_being_decoded() -> None:
    coded = zstd.compress_frames(bytes(range(250)), 100, huf=True)
    for begin, end in find_frames(memoryview(coded), 250, 100).tolist():
        assert begin % 8 == 0
        zstandard.ZstdDecompressor().decompress(coded[begin:end])
    with pytest.raises(IntegrityError, match="end within the zstd frame"):
        find_frames(memoryview(coded)[:-8], 250, 100)


def test_no_content_makes_no_frames() -> None:
    assert zstd.compress_frames(b"", 100, huf=True) == b""
    assert join(b"", 0, 100) == b""


def test_literals_alone_shrink_what_has_few_different_bytes() -> None:
    exponents = np.random.default_rng(0).normal(120, 2, 200_000).astype(np.uint8)
    coded = zstd.compress_frames(exponents.data, 65_536, huf=True)
    assert len(coded) < 0.45 * exponents.size


@pytest.mark.parametrize("difference", [-1, 1, 100, -100])
def test_another_size_than_expected_is_refused(difference: int) -> None:
    coded = zstd.compress_frames(bytes(1000), 400, huf=True)
    with pytest.raises(IntegrityError):
        join(coded, 1000 + difference, 400)


def test_other_cuts_than_expected_are_refused_although_the_content_is_the_same() -> None:
    coded = zstd.compress_frames(bytes(1000), 250, huf=True)
    with pytest.raises(IntegrityError, match="the zstd frame at byte 0 declares another size"):
        join(coded, 1000, 500)


def test_an_error_names_the_place() -> None:
    with pytest.raises(IntegrityError, match=r"^tensor 'w': there is no zstd frame at byte 0") as caught:
        decode_frames(memoryview(bytes(64)), np.empty(10, np.uint8), 10, where="tensor 'w'")
    assert caught.value.where == "tensor 'w'"
