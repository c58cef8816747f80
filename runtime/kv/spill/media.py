"""Storage for blocks outside the pool: host memory, and a file on a local disk.

A medium is an array of slots, each of the size of one block. It does not know the blocks in its
slots, any timings or its callers; calls come one at a time, and may block. The file is unnamed and
does not survive its process.
"""

from __future__ import annotations

import os
import tempfile
from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ....loader.errors import IntegrityError, UsageError

SLOT_ALIGNMENT_BYTES = 4096  # of the file's slots: two of them never share a page

Bytes = npt.NDArray[np.uint8]


class Medium(Protocol):
    """`num_slots` slots of `block_bytes` bytes. `close` is idempotent; no other method may be
    called after it.
    """

    @property
    def name(self) -> str:
        """The medium's name for metrics and logs."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    def write(self, slot: int, content: Bytes) -> None:
        """Store a copy of `content` (block_bytes,). After an OSError the slot has no readable
        content.
        """

    def read(self, slot: int, into: Bytes) -> None:
        """Fill `into` (block_bytes,) with the last content written.

        Raises OSError, or IntegrityError if the content has changed; then `into` is undefined.
        """

    def forget_cached(self, slot: int) -> None:
        """Drop the slot from caches, where possible, so that the next read is as slow as one of an
        old slot.
        """

    def close(self) -> None:
        """Free the memory or disk space."""


class HostMedium:
    """Host memory, touched as slots are written. It is as reliable as the pool, so nothing is
    verified.
    """

    name = "host"

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raises MemoryError."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._slots: Bytes = np.empty((num_slots, block_bytes), np.uint8)

    def write(self, slot: int, content: Bytes) -> None:
        np.copyto(self._slots[slot], content)  # releases the GIL, unlike a memoryview

    def read(self, slot: int, into: Bytes) -> None:
        np.copyto(into, self._slots[slot])

    def forget_cached(self, slot: int) -> None:
        pass  # no cache to drop

    def close(self) -> None:
        self._slots = np.empty((0, self.block_bytes), np.uint8)


class DiskMedium:
    """A sparse, unnamed file with owner-only access. A digest of each slot is kept in memory and
    compared.
    """

    name = "disk"

    def __init__(self, num_slots: int, block_bytes: int, folder: str) -> None:
        """Makes the folder where it is missing. Raises OSError if no file can be made in it."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._stride_bytes = slot_bytes_on_disk(block_bytes)
        self._digests: dict[int, bytes] = {}  # of written slots
        os.makedirs(folder, mode=0o700, exist_ok=True)
        # Made without a name if the file system supports that, and otherwise unlinked at once; mode
        # 0600.
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            self._file.truncate(num_slots * self._stride_bytes)
        except OSError:
            self._file.close()
            raise

    def write(self, slot: int, content: Bytes) -> None:
        self._digests.pop(slot, None)
        view, offset_bytes = content.data, slot * self._stride_bytes
        while view:
            num_written = os.pwrite(self._file.fileno(), view, offset_bytes)
            view, offset_bytes = view[num_written:], offset_bytes + num_written
        self._digests[slot] = blake3(content.data).digest()

    def read(self, slot: int, into: Bytes) -> None:
        view, offset_bytes = into.data, slot * self._stride_bytes
        while view:
            num_read = os.preadv(self._file.fileno(), [view], offset_bytes)
            if not num_read:
                raise OSError("the file was truncated")
            view, offset_bytes = view[num_read:], offset_bytes + num_read
        expected, got = self._digests[slot], blake3(into.data).digest()
        if got != expected:
            raise IntegrityError(
                f"slot {slot} of the spill file does not match its digest",
                where=f"slot {slot}",
                expected=expected.hex(),
                got=got.hex(),
            )

    def forget_cached(self, slot: int) -> None:
        """Drop the slot from the page cache. Raises OSError: the content is written to the device
        only now, and may not fit.
        """
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(
            self._file.fileno(), slot * self._stride_bytes, self._stride_bytes, os.POSIX_FADV_DONTNEED
        )

    def close(self) -> None:
        self._file.close()
        self._digests.clear()


def slot_bytes_on_disk(block_bytes: int) -> int:
    """The size of a block in the file."""
    return -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def open_media(block_bytes: int, *, host_bytes: int, disk_bytes: int, disk_dir: str | None) -> list[Medium]:
    """Open the media that these budgets allow, the faster one first; 0 bytes: none of that kind.

    Raises UsageError for a budget below one block, for memory that cannot be allocated, and for a
    folder in which no file can be made.
    """
    media: list[Medium] = []
    if host_bytes:
        num_slots = _num_slots("kv_host_bytes", host_bytes, block_bytes)
        try:
            media.append(HostMedium(num_slots, block_bytes))
        except MemoryError as error:
            raise UsageError(
                f"cannot allocate {host_bytes} bytes of memory for spilled blocks",
                key="kv_host_bytes",
                hint="Make kv_host_bytes smaller.",
            ) from error
    if disk_dir is not None and not disk_bytes:
        raise UsageError(
            "kv_disk_dir is set without kv_disk_bytes",
            key="kv_disk_bytes",
            hint="Set the size: --kv-disk-bytes SIZE.",
        )
    if disk_bytes:
        num_slots = _num_slots("kv_disk_bytes", disk_bytes, slot_bytes_on_disk(block_bytes))
        if disk_dir is None:
            raise UsageError(
                "kv_disk_bytes is set without kv_disk_dir",
                key="kv_disk_dir",
                hint="Name a folder on a local disk: --kv-disk-dir DIR.",
            )
        try:
            media.append(DiskMedium(num_slots, block_bytes, disk_dir))
        except OSError as error:
            raise UsageError(
                f"cannot create the spill file in {disk_dir}: {error.strerror or error}",
                key="kv_disk_dir",
                hint="Name a folder on a local disk that this process can write to.",
            ) from error
    return media


def _num_slots(key: str, budget_bytes: int, slot_bytes: int) -> int:
    if budget_bytes < slot_bytes:
        raise UsageError(
            f"{key} is {budget_bytes}, but one block of keys and values takes {slot_bytes} bytes",
            key=key,
            hint=f"Make {key} larger, or leave it out.",
        )
    return budget_bytes // slot_bytes
