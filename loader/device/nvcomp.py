"""Zstandard on the device: nvCOMP's C interface of version 5, called where the optional package is
installed.

Corrupt input is undefined behaviour there. So only frames reach it that belong to a part whose
digest was right, and whose headers were read on the host: each declares the size that its room has.
The status of each frame is checked before its content is used.

The library is found as a file of the package `nvidia-libnvcomp`; it is not imported. Other major
versions have other interfaces, and other file names.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

from ..errors import LoadError
from ..format.manifest import FRAME_ELEMENTS

LIBRARY = os.path.join("nvidia", "libnvcomp", "lib64", "libnvcomp.so.5")
SUCCESS = 0


class _Options(ctypes.Structure):
    """`nvcompBatchedZstdDecompressOpts_t`: the backend (0: its own choice), and bytes that must be
    zero.
    """

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


def find_library(folders: Iterable[str] | None = None) -> str | None:
    """The library's file, where Python's packages are; None when the package is not installed.
    `nvidia` is a folder that many packages share, and not always one that can be asked for the
    others.
    """
    paths = (os.path.join(folder, LIBRARY) for folder in (sys.path if folders is None else folders))
    return next((path for path in paths if os.path.isfile(path)), None)


class Decompressor:
    """nvCOMP's zstd. Launches work on streams; holds no memory."""

    def __init__(self, path: str) -> None:
        """Raises `LoadError` when the library cannot be used."""
        try:
            library = ctypes.CDLL(path)
            self._scratch = library.nvcompBatchedZstdDecompressGetTempSizeAsync
            self._decompress = library.nvcompBatchedZstdDecompressAsync
        except (OSError, AttributeError) as error:
            raise LoadError(f"{path} cannot be used: {error}") from error
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._scratch.argtypes = (size, size, _Options, ctypes.POINTER(size), size)
        self._decompress.argtypes = (
            *(pointer, pointer, pointer, pointer, size),
            *(pointer, size, pointer, _Options, pointer, pointer),
        )

    def scratch_bytes(self, num: int, total_bytes: int) -> int:
        """The extra device memory that decompressing these frames takes, of `bytes` in all: about
        three times the latter. Raises `LoadError`.
        """
        found = ctypes.c_size_t()
        self._check(self._scratch(num, FRAME_ELEMENTS, _Options(), ctypes.byref(found), total_bytes))
        return found.value

    def launch(self, chunks: int, num: int, scratch: int, scratch_bytes: int, stream: int) -> None:
        """Have `num` frames decompressed. `chunks` is the address of what `resolve_chunks` has
        written: five arrays of numbers of 64 bits, the last of which is filled here with the sizes
        that came out, and one of statuses. Raises `LoadError` when it cannot be launched.
        """
        coded, coded_bytes, decoded, decoded_bytes, actual_bytes, statuses = (
            chunks + 8 * num * place for place in range(6)
        )
        status = self._decompress(
            *(coded, coded_bytes, decoded_bytes, actual_bytes, num),
            *(scratch, scratch_bytes, decoded, _Options(), statuses, stream),
        )
        self._check(status)

    def _check(self, status: int) -> None:
        if status != SUCCESS:
            raise LoadError(
                f"nvCOMP refused to decompress, with status {status}",
                hint="Uninstall nvidia-libnvcomp to have the host decompress.",
            )
