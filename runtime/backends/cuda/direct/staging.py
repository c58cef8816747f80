"""Memory that numbers cross between the host and the device in: pinned, with its twin on the device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from .....loader.device.driver.base import Driver

MIN_BYTES = 64 << 10


class Room:
    """Pinned memory of the host, and as much on the device. Grows; its addresses change only then.

    Not thread-safe. What is written to `host` may be read by the device until the work that uses it
    is done.
    """

    def __init__(self, driver: Driver, stream: int, size_bytes: int = MIN_BYTES) -> None:
        self._driver = driver
        self._stream = stream
        self.size_bytes = 0
        self.address = 0
        self._host_address = 0
        self.host: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.at_least(size_bytes)

    def at_least(self, size_bytes: int) -> None:
        """Grow to this size. Waits for the stream's work then, and loses the content. Raises
        `CudaError`.
        """
        if size_bytes <= self.size_bytes:
            return
        self.close()
        size_bytes = 1 << max(size_bytes - 1, MIN_BYTES - 1).bit_length()
        self.address = self._driver.alloc(size_bytes)
        self._host_address = self._driver.alloc_host(size_bytes)
        self.size_bytes = size_bytes
        self.host = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self._host_address))

    def upload(self, size_bytes: int) -> None:
        """Queue a copy of the first bytes to the device."""
        self._driver.copy_in(self.address, self._host_address, size_bytes, self._stream)

    def download(self, size_bytes: int) -> None:
        """Queue a copy of the first bytes to the host."""
        self._driver.copy_out(self._host_address, self.address, size_bytes, self._stream)

    def close(self) -> None:
        """Wait for the stream's work, and free both."""
        if not self.size_bytes:
            return
        self._driver.synchronize_stream(self._stream)
        self.host = np.empty(0, np.uint8)
        self.size_bytes = 0
        self._driver.free(self.address)
        self._driver.free_host(self._host_address)


class Packer:
    """Arrays one behind the other, at multiples of 16 bytes."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes | npt.NDArray[Any]]] = []
        self.size_bytes = 0

    def add(self, numbers: npt.NDArray[Any] | bytes) -> int:
        """Returns the offset."""
        offset = self.size_bytes
        num_bytes = len(numbers) if isinstance(numbers, bytes) else numbers.nbytes
        self._parts.append((offset, numbers))
        self.size_bytes = -(-(offset + num_bytes) // 16) * 16
        return offset

    def write(self, host: npt.NDArray[np.uint8]) -> None:
        for offset, numbers in self._parts:
            plain = np.frombuffer(numbers, np.uint8) if isinstance(numbers, bytes) else numbers.view(np.uint8)
            host[offset : offset + plain.size] = plain.reshape(-1)
