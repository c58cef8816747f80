"""The place of decompression, host or device: a decision from measured rates. Pure.

The host does it unless it holds the load up: it has checked every byte then, and the link to the
device is seldom short. A device that can is tried where the host's cores cannot keep up with the
store, and kept where that is faster. What is stored raw takes neither way: it is sent as it is.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MARGIN = 1.1  # to be worth a change


class Path(enum.StrEnum):
    HOST = "host"
    DEVICE = "device"


class DeviceSpeed(NamedTuple):
    """A device's abilities, and its measured speed."""

    decompresses: bool = False
    # Stored bytes that it took, decompressed and merged; None: not measured.
    bytes_per_s: float | None = None


class PathChoice(NamedTuple):
    path: Path
    why: str


def choose_path(link_bytes_per_s: float, host_bytes_per_s: float | None, device: DeviceSpeed) -> PathChoice:
    """Rates are of stored bytes: what the store gives (0: unknown), and what all of the host's
    cores decompress.
    """
    if not device.decompresses:
        return PathChoice(Path.HOST, "the device does not decompress")
    if not link_bytes_per_s or host_bytes_per_s is None:
        return PathChoice(Path.HOST, "nothing was measured yet")
    if host_bytes_per_s >= MARGIN * link_bytes_per_s:
        return PathChoice(Path.HOST, "the host keeps up with the store")
    if device.bytes_per_s is None:
        return PathChoice(Path.DEVICE, "the host does not keep up with the store")
    if device.bytes_per_s > MARGIN * host_bytes_per_s:
        return PathChoice(Path.DEVICE, "the device is faster than the host")
    return PathChoice(Path.HOST, "the device is no faster than the host")
