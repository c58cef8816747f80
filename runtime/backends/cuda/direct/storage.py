"""The pool of keys and values on a device.

A token's keys are contiguous memory, and so is a block. `copy_out` returns the order of `KVStorage`,
so blocks move between both kinds of pools, and both read each other's snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ....kv.storage import Bytes, FloatBlocks, PoolShape
from .arguments import CopyBlocks, CopyTokens
from .device import DirectDevice
from .sources import BLOCKS
from .staging import Room

_COPY_BYTES = 8 << 20  # copied at a time
_THREADS = 256


class DirectKVStorage(FloatBlocks):
    """A `KVPool` on a device: (layers, 2, num_blocks, block_size, num_kv_heads, head_dim).

    All work is queued on the device's stream. Copies may come from any thread, one at a time.
    """

    def __init__(self, shape: PoolShape, device: DirectDevice) -> None:
        """Reserve the memory at once. Raises `CudaError`."""
        super().__init__(shape)
        self._device = device
        self._lock = threading.Lock()
        self._block_bytes = self.block_bytes(shape)
        self.address = device.driver.alloc(max(1, self.size_bytes))
        self._stored: Room | None = None
        self._numbers: Room | None = None

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self._block_bytes

    @property
    def element_bytes(self) -> int:
        return self.dtype.size_bytes

    def of_layer(self, layer: int) -> tuple[int, int]:
        """The addresses of the layer's keys and of its values."""
        plane_bytes = self.size_bytes // (2 * self.num_layers)
        keys = self.address + 2 * layer * plane_bytes
        return keys, keys + plane_bytes

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        with self._lock:
            for first, some in self._chunks(blocks):
                stored = self._copy(some, is_in=False)
                num_bytes = len(some) * self._block_bytes
                stored.download(num_bytes)
                self._device.driver.synchronize_stream(self._device.stream)
                into.reshape(-1)[first * self._block_bytes :][:num_bytes] = stored.host[:num_bytes]

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        with self._lock:
            for first, some in self._chunks(blocks):
                num_bytes = len(some) * self._block_bytes
                stored, _ = self._rooms(len(some))
                stored.host[:num_bytes] = content.reshape(-1)[first * self._block_bytes :][:num_bytes]
                stored.upload(num_bytes)
                self._copy(some, is_in=True)
                self._device.driver.synchronize_stream(self._device.stream)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        row = self.num_kv_heads * self.head_dim
        sizes = (self.num_blocks, self.block_size, row, source, target, num_tokens)
        kernels = self._device.kernels(self.dtype)
        arguments = CopyTokens(self.address, *sizes)
        launch = kernels.launch(BLOCKS, "copy_tokens", (2 * self.num_layers,), _THREADS, arguments)
        self._device.driver.launch(launch, self._device.stream)

    def close(self) -> None:
        """Wait for the stream's work, and free the memory."""
        for room in (self._stored, self._numbers):
            if room is not None:
                room.close()
        self._device.driver.synchronize_stream(self._device.stream)
        self._device.driver.free(self.address)

    def _chunks(self, blocks: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        size = max(1, _COPY_BYTES // self._block_bytes)
        return [(first, blocks[first : first + size]) for first in range(0, len(blocks), size)]

    def _rooms(self, num: int) -> tuple[Room, Room]:
        driver, stream = self._device.driver, self._device.stream
        if self._stored is None or self._numbers is None:
            self._stored, self._numbers = Room(driver, stream), Room(driver, stream)
        self._stored.at_least(num * self._block_bytes)
        self._numbers.at_least(4 * num)
        return self._stored, self._numbers

    def _copy(self, blocks: Sequence[int], *, is_in: bool) -> Room:
        stored, numbers = self._rooms(len(blocks))
        numbers.host[: 4 * len(blocks)].view(np.uint32)[:] = blocks
        numbers.upload(4 * len(blocks))
        sizes = (self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim, is_in)
        arguments = CopyBlocks(self.address, stored.address, numbers.address, *sizes)
        grid = len(blocks), 2 * self.num_layers
        kernels = self._device.kernels(self.dtype)
        self._device.driver.launch(
            kernels.launch(BLOCKS, "copy_blocks", grid, _THREADS, arguments), self._device.stream
        )
        return stored
