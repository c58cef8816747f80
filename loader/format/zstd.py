"""The one place that touches zstd: bytes ↔ runs of standard zstd frames, each at a multiple of 8
bytes.

Frames are decoded by the native core, and by python-zstandard where there is none. Invariant: a
frame's declared size is the one that the caller expects, at most `MAX_FRAME_BYTES`, or it is refused
before it is decompressed. So neither time nor memory follows a number that an attacker chose.
python-zstandard alone does not see to that: to it, frames of any sizes, windows and dictionaries,
with anything skippable between them, are one stream. So header and block headers are read here
before it gets them.

It does not know tensors, planes or manifests. `docs/format.md`, "Frames", is the norm.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from ..errors import IntegrityError
from ..native import merge as native

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FRAME_BYTES = 65_536  # decompressed; so no decoder needs a larger window
MAX_FRAME_BLOCKS = 256  # compressors make 1 to 4; bounds the walk over the block headers
FRAME_ALIGNMENT_BYTES = 8

_WINDOW_LOG = 16
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
# What fills up to the next multiple of 8, by the number of bytes that are missing to it.
_PADDINGS = (
    b"",
    *(struct.pack("<II", _SKIPPABLE_MAGIC, missing) + bytes(missing) for missing in range(1, 8)),
)
# Bits of the descriptor.
_SINGLE_SEGMENT, _RESERVED, _CHECKSUM, _DICTIONARY = 0x20, 0x18, 0x04, 0x03
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3
_FRAME_HEADER = struct.Struct("<IB")  # magic number and descriptor
# How a single-segment frame's content size is written, and what 0 means, by the descriptor's top
# two bits.
_CONTENT_SIZES = (
    (struct.Struct("<B"), 0),
    (struct.Struct("<H"), 256),
    (struct.Struct("<I"), 0),
    (struct.Struct("<Q"), 0),
)
# It has 3 bytes, so it is read together with the byte before it.
_BLOCK_HEADER = struct.Struct("<I")

# Zstd contexts are costly to make and must not be shared between threads.
_contexts = threading.local()


def compress_frames(
    data: bytes | bytearray | memoryview, frame_bytes: int, *, huf: bool, weighed: bool = False
) -> bytes:
    """`data` as frames that hold `frame_bytes` each, but for a shorter last one.

    With `huf` the frames hold entropy-coded literals and hardly any matches, which decodes fastest
    and suits planes without repetitions; else they are zstd's level 1. With `weighed`, too, the few
    matches are only those that save bits, which takes ten times as long: where a few symbols are
    frequent, others save nothing, and cost half of the speed of decoding. Compresses without the
    GIL.
    """
    assert 0 < frame_bytes <= MAX_FRAME_BYTES
    view = memoryview(data).cast("B")
    compress = _compressor(huf, weighed).compress
    pieces: list[bytes] = []
    for start in range(0, len(view), frame_bytes):
        frame = compress(view[start : start + frame_bytes])
        pieces += frame, _PADDINGS[-len(frame) % FRAME_ALIGNMENT_BYTES]
    return b"".join(pieces)


class FrameReader:
    """Reads the content of a run of frames, piece by piece, into memory of the caller's.

    The frames of a piece are decompressed in one call without the GIL (python-zstandard takes it for
    an instant between two of them): decoding threads seldom wait for each other. The methods raise
    `IntegrityError` for what is not exactly as the format says; the piece that was being read is
    then undefined.
    """

    __slots__ = ("_frame_bytes", "_offset", "_src", "_where")

    def __init__(self, src: memoryview, frame_bytes: int, *, where: str = "") -> None:
        """`src` holds frames of `frame_bytes` each, but for a shorter last one. `where` names it in
        errors.
        """
        assert 0 < frame_bytes <= MAX_FRAME_BYTES
        self._src = src
        self._frame_bytes = frame_bytes
        self._where = where
        self._offset = 0

    def read_into(self, out: NDArray[np.uint8]) -> None:
        """Fill `out`, contiguous, with the next frames, the last of which is shorter where `out`
        ends within it.

        Whatever the frames hold, nothing outside `out` is written, and no memory is taken for their
        content.
        """
        begin = self._offset
        decoded = native.decode_frames(np.asarray(self._src[begin:]), out, self._frame_bytes, only_quick=True)
        if decoded is None:
            self._decompress_into(out)
            return
        is_whole, end = decoded
        if not is_whole:
            self._check_frames(out.size)  # says what is wrong with headers and paddings
            raise _damaged(f"the zstd frame at byte {begin + end} cannot be decoded", self._where)
        self._offset = begin + end

    def _decompress_into(self, out: NDArray[np.uint8]) -> None:
        begin = self._offset
        end = self._check_frames(out.size)
        # One reader a piece, because planes are read by turns, and a thread has only one
        # decompressor.
        reader = _decompressor().stream_reader(self._src[begin:end], read_across_frames=True)
        try:
            filled_bytes = reader.readinto(out.data)
        except zstandard.ZstdError as error:
            raise _damaged(
                f"a zstd frame in bytes {begin} to {end} cannot be decoded ({error})", self._where
            ) from error
        if filled_bytes != out.size:
            raise _damaged(
                f"the zstd frames in bytes {begin} to {end} do not hold what they declare", self._where
            )

    def skip(self, size_bytes: int) -> list[tuple[int, int]]:
        """Step over the frames that hold the next `size_bytes`, checked as always but not
        decompressed: a device does that. Of each frame: where it begins, and how many
        bytes it has.
        """
        extents: list[tuple[int, int]] = []
        for start in range(0, size_bytes, self._frame_bytes):
            begin = self._offset
            end = self._check_frames(min(self._frame_bytes, size_bytes - start))
            extents.append((begin, end - begin))
        return extents

    def finish(self) -> None:
        """Check that nothing follows what was read."""
        left_bytes = len(self._src) - self._offset
        if left_bytes:
            raise _damaged(f"{left_bytes} bytes follow the last zstd frame", self._where)

    def _check_frames(self, size_bytes: int) -> int:
        """Step over the frames that hold the next `size_bytes`, and their padding; where the last
        frame ends.
        """
        src, where, offset, end = self._src, self._where, self._offset, self._offset
        for start in range(0, size_bytes, self._frame_bytes):
            end = _end_of_frame(src, offset, min(self._frame_bytes, size_bytes - start), where)
            offset = _end_of_padding(src, end, where)
        self._offset = offset
        return end


def _end_of_frame(src: memoryview, offset: int, content_bytes: int, where: str) -> int:
    """The end of the frame at `offset`, by RFC 8878, section 3.1.1. It must declare
    `content_bytes`.
    """
    magic, descriptor = _unpack(_FRAME_HEADER, src, offset, where)
    if magic != _ZSTD_MAGIC:
        raise _damaged(f"there is no zstd frame at byte {offset}", where)
    if descriptor & (_SINGLE_SEGMENT | _RESERVED | _CHECKSUM | _DICTIONARY) != _SINGLE_SEGMENT:
        raise _damaged(
            f"the zstd frame at byte {offset} has no content size, or a window, checksum or dictionary", where
        )
    size_field, least_bytes = _CONTENT_SIZES[descriptor >> 6]
    cursor = offset + _FRAME_HEADER.size
    declared_bytes = _unpack(size_field, src, cursor, where)[0] + least_bytes
    if declared_bytes != content_bytes:
        raise _damaged(
            f"the zstd frame at byte {offset} declares {declared_bytes} bytes, not {content_bytes}", where
        )
    cursor += size_field.size
    for _ in range(MAX_FRAME_BLOCKS):
        header = _unpack(_BLOCK_HEADER, src, cursor - 1, where)[0] >> 8
        block_type, block_bytes = header >> 1 & 3, header >> 3
        if block_type == _RESERVED_BLOCK:
            break
        cursor += 3 + (1 if block_type == _RLE_BLOCK else block_bytes)
        if header & 1:  # the last block
            if cursor > len(src):
                raise _ends_early(src, where)
            return cursor
    raise _damaged(f"the zstd frame at byte {offset} has too many blocks, or one of an unknown type", where)


def _end_of_padding(src: memoryview, offset: int, where: str) -> int:
    """The next multiple of 8 where a frame can start, behind the skippable frame that fills up to
    it.
    """
    padding = _PADDINGS[-offset % FRAME_ALIGNMENT_BYTES]
    end = offset + len(padding)
    if src[offset:end] != padding:
        if end > len(src):
            raise _ends_early(src, where)
        raise _damaged(f"the padding at byte {offset} is not the shortest skippable frame of zeros", where)
    return end


def _unpack(layout: struct.Struct, src: memoryview, offset: int, where: str) -> tuple[int, ...]:
    try:
        return layout.unpack_from(src, offset)
    except struct.error as error:
        raise _ends_early(src, where) from error


def _ends_early(src: memoryview, where: str) -> IntegrityError:
    return _damaged(f"its {len(src)} bytes end within a zstd frame", where)


def _damaged(message: str, where: str) -> IntegrityError:
    return IntegrityError(f"{where}: {message}" if where else message, where=where)


def _compressor(huf: bool, weighed: bool) -> zstandard.ZstdCompressor:
    name = ("weighed" if weighed else "literals_only") if huf else "level_1"
    if not hasattr(_contexts, name):
        setattr(_contexts, name, zstandard.ZstdCompressor(compression_params=_parameters(huf, weighed)))
    compressor: zstandard.ZstdCompressor = getattr(_contexts, name)
    return compressor


def _parameters(huf: bool, weighed: bool) -> zstandard.ZstdCompressionParameters:
    if not huf:
        return zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG)
    if weighed:
        return zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_BTOPT,
            window_log=_WINDOW_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=6,
            target_length=8,
        )
    # 64 hash entries and matches of 7 bytes or more find next to nothing in weights. That is the
    # aim: matches cost more time to decode than they save space.
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=_WINDOW_LOG,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_FRAME_BYTES)
    decompressor: zstandard.ZstdDecompressor = _contexts.decompressor
    return decompressor
