"""The memory of a pool on one machine: the ledger of its instances, and what processes use.

The ledger holds reservations and the measured proportional set size (PSS), in bytes. A reservation
is made before a process starts and lasts until it has ended, so two starts never count on the same
bytes. Used on the event loop only, but for `tree_pss_bytes`, which blocks. Linux only.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from .values import DeviceShare


class Budget:
    """Reservations by key. What a process was measured to use counts where it is more than its reservation.

    A reservation may have a share of a device, too: those of one device sum to 1 at most.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[str, int] = {}
        self._measured: dict[str, int] = {}
        self._shares: dict[str, DeviceShare] = {}
        self._changed = asyncio.Event()

    @property
    def charged_bytes(self) -> int:
        return sum(max(size, self._measured.get(key, 0)) for key, size in self._reserved.items())

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.charged_bytes

    @property
    def used_bytes(self) -> int:
        """The measured bytes."""
        return sum(self._measured.values())

    def charge_of(self, key: str) -> int:
        return max(self._reserved.get(key, 0), self._measured.get(key, 0))

    def free_percent(self, device: str) -> int:
        return 100 - sum(self.share_of(key, device) for key in self._shares)

    def share_of(self, key: str, device: str) -> int:
        """The percent that is reserved of that device."""
        share = self._shares.get(key)
        return 0 if share is None or share.device != device else share.percent

    def shares(self) -> dict[str, int]:
        """The percent that is reserved of each device."""
        devices = {share.device for share in self._shares.values()}
        return {device: 100 - self.free_percent(device) for device in sorted(devices)}

    def reserve(self, key: str, size_bytes: int, share: DeviceShare | None = None) -> bool:
        """Reserve both if they fit; False if they do not."""
        if size_bytes > self.free_bytes:
            return False
        if share is not None:
            if share.percent > self.free_percent(share.device):
                return False
            self._shares[key] = share
        self._reserved[key] = size_bytes
        return True

    def keep(self, key: str, size_bytes: int) -> None:
        """Reserve for what runs already, whether it fits or not."""
        self._reserved[key] = size_bytes
        self.notify()

    def measure(self, key: str, used_bytes: int) -> None:
        if key in self._reserved:
            self._measured[key] = used_bytes

    def release(self, key: str) -> None:
        """Idempotent."""
        self._reserved.pop(key, None)
        self._measured.pop(key, None)
        self._shares.pop(key, None)
        self.notify()

    def notify(self) -> None:
        """Wake all that wait for memory: something has become free, or idle."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next `notify`, or after `timeout_s`."""
        event = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


def tree_pss_bytes(pid: int) -> int:
    """The memory of a process and its descendants, each shared page counted by its share. 0 when they are gone."""
    return sum(map(_pss_bytes, process_tree(pid)))


def _pss_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, IndexError):  # where it may not be read: all of what it shares, too
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that are there."""
    found = [pid]
    pending = [pid]
    while pending:
        with suppress(OSError, ValueError):
            for task in Path(f"/proc/{pending.pop()}/task").iterdir():
                with suppress(OSError, ValueError):
                    children = [int(text) for text in (task / "children").read_text().split()]
                    found += children
                    pending += children
    return found
