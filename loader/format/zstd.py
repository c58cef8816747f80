"""Bytes → runs of standard zstd frames, each at a multiple of 8 bytes.

For packing; `native/frames.py` is the way back, and makes frames without matches. It does not know tensors, planes or
manifests. `docs/format.md`, "Frames", is the norm.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from ..native.frames import encode_frames

MAX_FRAME_BYTES = 65_536  # decompressed; so no decoder needs a larger window
FRAME_ALIGNMENT_BYTES = 8

_WINDOW_LOG = 16
_SKIPPABLE_MAGIC = 0x184D2A50
# What fills up to the next multiple of 8, by the number of bytes that are missing to it.
_PADDINGS = (
    b"",
    *(struct.pack("<II", _SKIPPABLE_MAGIC, missing) + bytes(missing) for missing in range(1, 8)),
)
# Zstd contexts are costly to make and must not be shared between threads.
_contexts = threading.local()


def compress_frames(
    data: bytes | bytearray | memoryview, frame_bytes: int, *, huf: bool
) -> bytes | memoryview:
    """`data` as frames that hold `frame_bytes` each, but for a shorter last one.

    With `huf` the frames hold entropy-coded literals alone, which decodes fastest and suits planes
    without repetitions; else they are zstd's level 1. Compresses without the GIL.
    """
    assert 0 < frame_bytes <= MAX_FRAME_BYTES
    view = memoryview(data).cast("B")
    if huf:
        return encode_frames(view, frame_bytes)
    compress = _compressor().compress
    pieces: list[bytes] = []
    for start in range(0, len(view), frame_bytes):
        frame = compress(view[start : start + frame_bytes])
        pieces += frame, _PADDINGS[-len(frame) % FRAME_ALIGNMENT_BYTES]
    return b"".join(pieces)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_contexts, "level_1"):
        parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG)
        _contexts.level_1 = zstandard.ZstdCompressor(compression_params=parameters)
    compressor: zstandard.ZstdCompressor = _contexts.level_1
    return compressor
