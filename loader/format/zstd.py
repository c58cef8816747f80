"""The one place that touches zstd: bytes ↔ runs of standard zstd frames, each at a multiple of 8 bytes.

Invariant: no frame is given to the decompressor before its header and block headers were read here, and its
declared size found to be the one that the caller expects, at most `MAX_FRAME_BYTES`. So neither time nor
memory follows a number that an attacker chose. python-zstandard alone does not see to that: it ignores
`max_output_size` when a frame declares a size, and drops what follows a frame without a word.

It does not know tensors, planes or manifests. `docs/format.md`, "Frames", is the norm.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from ..errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FRAME_BYTES = 65_536  # decompressed; so no decoder needs a larger window
MAX_FRAME_BLOCKS = 256  # compressors make 1 to 4; bounds the walk over the block headers
FRAME_ALIGNMENT_BYTES = 8

_WINDOW_LOG = 16
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
_SKIPPABLE_HEADER_BYTES = 8
_CONTENT_SIZE_BYTES = (1, 2, 4, 8)  # by the descriptor's top two bits, in a single-segment frame
_SINGLE_SEGMENT, _RESERVED, _CHECKSUM, _DICTIONARY = 0x20, 0x18, 0x04, 0x03  # bits of the descriptor
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3

_contexts = threading.local()  # zstd contexts are costly to make and must not be shared between threads


def compress_frames(data: bytes | bytearray | memoryview, frame_bytes: int, *, huf: bool) -> bytes:
    """`data` as frames that hold `frame_bytes` each, but for a shorter last one.

    With `huf` the frames hold entropy-coded literals and hardly any matches, which decodes fastest and
    suits planes without repetitions; else they are zstd's level 1. Compresses without the GIL.
    """
    assert 0 < frame_bytes <= MAX_FRAME_BYTES
    view = memoryview(data).cast("B")
    compress = _compressor(huf).compress
    pieces: list[bytes] = []
    for start in range(0, len(view), frame_bytes):
        frame = compress(view[start : start + frame_bytes])
        pieces.append(frame)
        if padding_bytes := -len(frame) % FRAME_ALIGNMENT_BYTES:
            pieces.append(struct.pack("<II", _SKIPPABLE_MAGIC, padding_bytes) + bytes(padding_bytes))
    return b"".join(pieces)


def decompressed_frames(
    src: memoryview, size_bytes: int, frame_bytes: int, *, where: str = ""
) -> Iterator[NDArray[np.uint8]]:
    """The contents of the frames in `src`, `size_bytes` in all: `frame_bytes` each, the last may be shorter.

    `src` must end with the last frame's padding. Takes memory for one frame at a time, which the caller
    owns. Raises `IntegrityError` for anything else, possibly after some frames were handed out.
    """
    assert 0 < frame_bytes <= MAX_FRAME_BYTES
    decompress = _decompressor().decompress
    offset = 0
    for start in range(0, size_bytes, frame_bytes):
        content_bytes = min(frame_bytes, size_bytes - start)
        end = _end_of_frame(src, offset, content_bytes, where)
        try:
            content = decompress(src[offset:end], allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _damaged(f"the zstd frame at byte {offset} cannot be decoded ({error})", where) from error
        if len(content) != content_bytes:
            raise _damaged(f"the zstd frame at byte {offset} does not hold what it declares", where)
        yield np.frombuffer(content, np.uint8)
        offset = _end_of_padding(src, end, where)
    if offset != len(src):
        raise _damaged(f"{len(src) - offset} bytes follow the last zstd frame", where)


def _end_of_frame(src: memoryview, offset: int, content_bytes: int, where: str) -> int:
    """Where the frame at `offset` ends, by RFC 8878, section 3.1.1. It must declare `content_bytes`."""
    magic, descriptor = _unpack("<IB", src, offset, where)
    if magic != _ZSTD_MAGIC:
        raise _damaged(f"there is no zstd frame at byte {offset}", where)
    if descriptor & (_SINGLE_SEGMENT | _RESERVED | _CHECKSUM | _DICTIONARY) != _SINGLE_SEGMENT:
        raise _damaged(
            f"the zstd frame at byte {offset} has no content size, or a window, checksum or dictionary", where
        )
    cursor = offset + 5
    width = _CONTENT_SIZE_BYTES[descriptor >> 6]
    declared_bytes = int.from_bytes(src[cursor : cursor + width], "little") + (256 if width == 2 else 0)
    if declared_bytes != content_bytes:
        raise _damaged(
            f"the zstd frame at byte {offset} declares {declared_bytes} bytes, not {content_bytes}", where
        )
    cursor += width
    for _ in range(MAX_FRAME_BLOCKS):
        low, high = _unpack("<HB", src, cursor, where)
        header = high << 16 | low
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
    """The next multiple of 8 where a frame can start, behind the skippable frame that fills up to it."""
    padding_bytes = -offset % FRAME_ALIGNMENT_BYTES
    if not padding_bytes:
        return offset
    magic, declared_bytes = _unpack("<II", src, offset, where)
    start = offset + _SKIPPABLE_HEADER_BYTES
    padding = bytes(src[start : start + padding_bytes])
    if (magic, declared_bytes, padding) != (_SKIPPABLE_MAGIC, padding_bytes, bytes(padding_bytes)):
        raise _damaged(
            f"the padding at byte {offset} is not {padding_bytes} zeros in a skippable frame", where
        )
    return start + padding_bytes


def _unpack(layout: str, src: memoryview, offset: int, where: str) -> tuple[int, ...]:
    if offset + struct.calcsize(layout) > len(src):
        raise _ends_early(src, where)
    return struct.unpack_from(layout, src, offset)


def _ends_early(src: memoryview, where: str) -> IntegrityError:
    return _damaged(f"its {len(src)} bytes end within a zstd frame", where)


def _damaged(message: str, where: str) -> IntegrityError:
    return IntegrityError(f"{where}: {message}" if where else message, where=where)


def _compressor(huf: bool) -> zstandard.ZstdCompressor:
    name = "literals_only" if huf else "level_1"
    if not hasattr(_contexts, name):
        setattr(_contexts, name, zstandard.ZstdCompressor(compression_params=_parameters(huf)))
    compressor: zstandard.ZstdCompressor = getattr(_contexts, name)
    return compressor


def _parameters(huf: bool) -> zstandard.ZstdCompressionParameters:
    if not huf:
        return zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG)
    # 64 hash entries and matches of 7 bytes or more find next to nothing in weights. That is the aim: matches
    # cost more time to decode than they save space.
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
