"""The one place that touches zstd: planes ↔ runs of standard zstd frames that start at multiples of 8 bytes.

Invariant: nothing is decompressed before its frame's header was read here and found to declare exactly the size that the
manifest leaves for it, so neither time nor memory follows a number that an attacker chose. python-zstandard alone does not
give that: it ignores `max_output_size` when a frame declares a size, and drops trailing bytes silently.

It does not know tensors, planes or manifests. `docs/format.md`, "Frames", is the norm.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FRAME_BYTES = 65_536  # decompressed; also the largest window that a decoder must provide
FRAME_ALIGNMENT_BYTES = 8

_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
_SKIPPABLE_HEADER_BYTES = 8
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)  # by the header's two-bit flag; a single-segment frame has 1 for flag 0

_local = threading.local()  # zstd contexts are costly to make and must not be shared between threads


def compress_frames(data: bytes | bytearray | memoryview, frame_bytes: int, *, huf: bool) -> bytes:
    """`data` as frames of `frame_bytes` each (the last may be shorter), every one padded to a multiple of 8 bytes.

    With `huf` frames hold entropy-coded literals only, which suits planes without repetitions and decodes fastest;
    without it they are zstd level 1. Runs without the GIL but for a few microseconds a frame.
    """
    view = memoryview(data).cast("B")
    compress = _compressor(huf).compress
    pieces: list[bytes] = []
    for start in range(0, len(view), frame_bytes):
        frame = compress(view[start : start + frame_bytes])
        pieces.append(frame)
        if padding_bytes := -len(frame) % FRAME_ALIGNMENT_BYTES:
            pieces.append(struct.pack("<II", _SKIPPABLE_MAGIC, padding_bytes) + bytes(padding_bytes))
    return b"".join(pieces)


def decompress_frames_into(src: memoryview, dst: NDArray[np.uint8], *, where: str = "") -> None:
    """Fill `dst` with the frames in `src`, which must hold exactly that much and end exactly there.

    All frames but the last hold `MAX_FRAME_BYTES`. Raises `IntegrityError` otherwise; `dst` is then undefined.
    """
    start = 0
    for frame in decompressed_frames(src, dst.size, MAX_FRAME_BYTES, where=where):
        np.copyto(dst[start : start + frame.size], frame)
        start += frame.size


def decompressed_frames(
    src: memoryview, total_bytes: int, frame_bytes: int, *, where: str = ""
) -> Iterator[NDArray[np.uint8]]:
    """The contents of the frames in `src`, one after another: `total_bytes` in all, `frame_bytes` each but the last.

    Needs memory for one frame at a time. Raises `IntegrityError`, possibly after some frames were given out.
    """
    decompress = _decompressor().decompress
    offset = 0
    for start in range(0, total_bytes, frame_bytes):
        content_bytes = min(frame_bytes, total_bytes - start)
        end = _end_of_frame(src, offset, content_bytes, where)
        try:
            content = decompress(src[offset:end], allow_extra_data=False)
        except _zstd_error() as error:
            raise _damaged(f"the zstd frame at byte {offset} cannot be decoded: {error}", where) from error
        if len(content) != content_bytes:
            raise _damaged(f"the zstd frame at byte {offset} is shorter than it declares", where)
        yield np.frombuffer(content, np.uint8)
        offset = _skip_padding(src, end, where)
    if offset != len(src):
        raise _damaged(f"{len(src) - offset} bytes follow the last zstd frame", where)


def _end_of_frame(src: memoryview, offset: int, content_bytes: int, where: str) -> int:
    """Where the frame at `offset` ends, by its block headers (RFC 8878, 3.1.1); checks all that its header declares."""
    magic, descriptor = _unpack("<IB", src, offset, where)
    if magic != _ZSTD_MAGIC:
        raise _damaged(f"no zstd frame starts at byte {offset}", where)
    single_segment, has_checksum, dictionary_flag = descriptor & 0x20, descriptor & 0x04, descriptor & 0x03
    if descriptor & 0x18 or has_checksum or dictionary_flag or not single_segment:
        raise _damaged(f"the zstd frame at byte {offset} uses features that the format does not allow", where)
    cursor = offset + 5
    size_bytes = _CONTENT_SIZE_BYTES[descriptor >> 6] or 1
    declared = int.from_bytes(src[cursor : cursor + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if declared != content_bytes:
        raise _damaged(
            f"the zstd frame at byte {offset} declares {declared} bytes, not {content_bytes}", where
        )
    cursor += size_bytes
    is_last = False
    while not is_last:
        low, high = _unpack("<HB", src, cursor, where)
        header = low | high << 16
        is_last, block_type, block_bytes = bool(header & 1), header >> 1 & 3, header >> 3
        if block_type == _RESERVED_BLOCK or block_bytes > MAX_FRAME_BYTES:
            raise _damaged(f"the zstd frame at byte {offset} holds an invalid block", where)
        cursor += 3 + (1 if block_type == _RLE_BLOCK else block_bytes)
    if cursor > len(src):
        raise _damaged(f"the zstd frame at byte {offset} is cut off", where)
    return cursor


def _skip_padding(src: memoryview, offset: int, where: str) -> int:
    """The offset behind the skippable frame that fills up to a multiple of 8, when one is needed."""
    padding_bytes = -offset % FRAME_ALIGNMENT_BYTES
    if not padding_bytes:
        return offset
    end = offset + _SKIPPABLE_HEADER_BYTES + padding_bytes
    if _unpack("<II", src, offset, where) != (_SKIPPABLE_MAGIC, padding_bytes) or any(
        src[end - padding_bytes : end]
    ):
        raise _damaged(f"the padding at byte {offset} is not the one that the format prescribes", where)
    if end > len(src):
        raise _damaged(f"the padding at byte {offset} is cut off", where)
    return end


def _unpack(layout: str, src: memoryview, offset: int, where: str) -> tuple[int, ...]:
    try:
        return struct.unpack_from(layout, src, offset)
    except struct.error:
        raise _damaged(f"the zstd frames end early, at byte {len(src)}", where) from None


def _damaged(message: str, where: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: {message}" if where else message,
        where=where,
        hint="Pack the model again; `teneral verify` lists every damaged part.",
    )


def _compressor(huf: bool) -> Any:
    name = "huf" if huf else "level_1"
    if not hasattr(_local, name):
        setattr(_local, name, _new_compressor(huf))
    return getattr(_local, name)


def _new_compressor(huf: bool) -> Any:
    import zstandard

    # The literals-only settings: a hash table of 64 entries and matches of at least 7 bytes find next to nothing, which
    # is wanted, since matches in weights cost more time to decode than they save space.
    parameters = (
        zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=16,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
        )
        if huf
        else zstandard.ZstdCompressionParameters.from_level(
            1, window_log=16, write_content_size=True, write_checksum=False, write_dict_id=False
        )
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        import zstandard

        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_FRAME_BYTES)
    return _local.decompressor


def _zstd_error() -> type[Exception]:
    import zstandard

    error: type[Exception] = zstandard.ZstdError
    return error
