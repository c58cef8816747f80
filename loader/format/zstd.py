"""Bytes → runs of standard zstd frames, each at a multiple of 8 bytes.

For packing; `native/frames.py` is the way back. It does not know tensors, planes or manifests.
`docs/format.md`, "Frames", is the norm.
"""

from __future__ import annotations

import struct
import threading

import zstandard

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
