"""Compressed request bodies: gzip, deflate and zstd, as HTTP's `Content-Encoding` names them.

A body comes out in pieces of bounded size, so that its reader can stop at its own limit: a few bytes
can become gigabytes. This module has no limit on the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from .errors import ApiError

PIECE_BYTES = 64 << 10  # of a decompressed body
# A zstd frame asks for a window of this size; levels up to 19 take no more than 8 MiB.
MAX_WINDOW_BYTES = 8 << 20
ZSTD_STEP_BYTES = 64  # of compressed data, at most 2 MiB of a body
ENCODINGS = ("gzip", "deflate", "zstd")


class BodyDecompressor(Protocol):
    """The decompression of one body."""

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what this much more of the body comes to. Raises `ApiError` 400 for damaged data."""

    def finish(self) -> None:
        """Check that the body was complete. Raises `ApiError` 400."""


def decompressor_of(encodings: Sequence[str]) -> BodyDecompressor | None:
    """A decompressor by the values of `Content-Encoding`; None for a plain body. Raises `ApiError` 415."""
    names = [name for each in encodings for name in each.lower().replace(" ", "").split(",") if name]
    names = [name for name in names if name != "identity"]
    if not names:
        return None
    if names in (["gzip"], ["x-gzip"]):
        return _Zlib("gzip", zlib.MAX_WBITS | 16)
    if names == ["deflate"]:
        return _Zlib("deflate", zlib.MAX_WBITS)
    if names == ["zstd"]:
        return _Zstd()
    raise ApiError(
        415,
        f"Content-Encoding {', '.join(names)[:100]!r} is not supported: send gzip, deflate or zstd, once, or "
        "the body uncompressed",
        code="unsupported_encoding",
        headers={"Accept-Encoding": ", ".join(ENCODINGS)},
    )


class _Zlib:
    def __init__(self, name: str, window_bits: int) -> None:
        self._name = name
        self._stream = zlib.decompressobj(window_bits)

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        if self._stream.eof and chunk:
            raise _damaged(self._name, "data follows its end")
        while chunk:
            try:
                piece = self._stream.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise _damaged(self._name, str(error)) from None
            if self._stream.unused_data:
                raise _damaged(self._name, "data follows its end")
            chunk = self._stream.unconsumed_tail
            if piece:
                yield piece

    def finish(self) -> None:
        if not self._stream.eof:
            raise _damaged(self._name, "it is incomplete")


class _Zstd:
    def __init__(self) -> None:
        import zstandard  # lazy: most requests are not compressed

        self._error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        # The library has no limit on what one call gives out: 4 bytes can be a block of 128 KiB.
        for start in range(0, len(chunk), ZSTD_STEP_BYTES):
            if self._stream.eof:
                raise _damaged("zstd", "data follows its end")
            try:
                piece = self._stream.decompress(chunk[start : start + ZSTD_STEP_BYTES])
            except self._error as error:
                raise _damaged("zstd", str(error)) from None
            if self._stream.unused_data:
                raise _damaged("zstd", "data follows its end")
            if piece:
                yield piece

    def finish(self) -> None:
        if not self._stream.eof:
            raise _damaged("zstd", "it is incomplete")


def _damaged(name: str, why: str) -> ApiError:
    return ApiError(400, f"the body is not valid {name}: {why[:200]}", code="invalid_encoding")
