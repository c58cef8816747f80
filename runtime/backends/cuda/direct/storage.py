"""The pools of keys and values on a device.

A token's keys are contiguous memory, and so is a block. `copy_out` returns the order of the host's
pools, so blocks move between both kinds of pools, and both read each other's snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....kv.storage import Bytes, FloatBlocks, Int8Blocks, PoolShape
from .arguments import CopyBlocks, CopyTokens
from .device import DirectDevice
from .sources import BLOCKS
from .staging import Room

_COPY_BYTES = 8 << 20  # copied at a time
_THREADS = 256
_WORD_BYTES = 2  # in which blocks are copied


class LayerPlaces(NamedTuple):
    """The addresses of a layer's keys and values, which are one of latents, and of their scales; 0: they have none."""

    keys: int
    values: int
    key_scales: int = 0
    value_scales: int = 0


class _Plane(NamedTuple):
    """Numbers of all heads of all slots: (layers, parts, num_blocks, block_size, num_kv_heads, head_words)."""

    address: int
    head_words: int
    stored_words: int  # of a block, before these


class _DevicePool:
    """A `KVPool` on a device, over one or two planes, in memory that is reserved at once.

    All work is queued on the device's stream. Copies may come from any thread, one at a time.
    """

    def __init__(self, shape: PoolShape, device: DirectDevice, head_words: Sequence[int]) -> None:
        """Raises `CudaError`."""
        self._device = device
        self._shape = shape
        self._lock = threading.Lock()
        self._num_parts = shape.num_layers * shape.num_parts  # keys and values of a layer, or latents
        heads = self._num_parts * shape.block_size * shape.num_kv_heads  # of a block
        self._block_words = heads * sum(head_words)
        self.size_bytes = shape.num_blocks * self._block_words * _WORD_BYTES
        self.address = device.driver.alloc(max(1, self.size_bytes))
        self._planes: list[_Plane] = []
        words = 0
        for own in head_words:
            address = self.address + shape.num_blocks * words * _WORD_BYTES
            self._planes.append(_Plane(address, own, words))
            words += heads * own
        self._stored: Room | None = None
        self._numbers: Room | None = None

    def of_layer(self, layer: int) -> LayerPlaces:
        places: list[int] = []
        shape = self._shape
        for plane in self._planes:
            slots = shape.num_blocks * shape.block_size
            part_bytes = slots * shape.num_kv_heads * plane.head_words * _WORD_BYTES
            keys = plane.address + shape.num_parts * layer * part_bytes
            places += (keys, keys + (shape.num_parts - 1) * part_bytes)
        return LayerPlaces(*places)

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
        shape = self._shape
        kernels = self._device.kernels(shape.dtype)
        for plane in self._planes:
            row = shape.num_kv_heads * plane.head_words
            sizes = (shape.num_blocks, shape.block_size, row, source, target, num_tokens)
            arguments = CopyTokens(plane.address, *sizes)
            launch = kernels.launch(BLOCKS, "copy_tokens", (self._num_parts,), _THREADS, arguments)
            self._device.driver.launch(launch, self._device.stream)

    @property
    def is_open(self) -> bool:
        return self.address != 0

    def close(self) -> None:
        """Wait for the stream's work, and free the memory. Idempotent."""
        if not self.is_open:
            return
        for room in (self._stored, self._numbers):
            if room is not None:
                room.close()
        self._device.driver.synchronize_stream(self._device.stream)
        self._device.driver.free(self.address)
        self.address = 0

    @property
    def _block_bytes(self) -> int:
        return self._block_words * _WORD_BYTES

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
        shape, (stored, numbers) = self._shape, self._rooms(len(blocks))
        numbers.host[: 4 * len(blocks)].view(np.uint32)[:] = blocks
        numbers.upload(4 * len(blocks))
        kernels, grid = self._device.kernels(shape.dtype), (len(blocks), self._num_parts)
        for plane in self._planes:
            place = stored.address + plane.stored_words * _WORD_BYTES
            sizes = (shape.num_blocks, shape.block_size, shape.num_kv_heads, plane.head_words)
            arguments = CopyBlocks(
                plane.address, place, numbers.address, *sizes, self._block_words, int(is_in)
            )
            launch = kernels.launch(BLOCKS, "copy_blocks", grid, _THREADS, arguments)
            self._device.driver.launch(launch, self._device.stream)
        return stored


class DirectKVStorage(_DevicePool, FloatBlocks):
    """Keys and values in the model's dtype."""

    def __init__(self, shape: PoolShape, device: DirectDevice) -> None:
        FloatBlocks.__init__(self, shape)
        _DevicePool.__init__(self, shape, device, [shape.head_dim])

    @property
    def element_bytes(self) -> int:
        return self.dtype.size_bytes


class DirectInt8KVStorage(_DevicePool, Int8Blocks):
    """Keys and values as int8 codes, and a scale for each head of each token: `kv.storage.Int8KVStorage`."""

    def __init__(self, shape: PoolShape, device: DirectDevice) -> None:
        Int8Blocks.__init__(self, shape)
        _DevicePool.__init__(self, shape, device, [shape.head_dim // _WORD_BYTES, 1])


DirectPool = DirectKVStorage | DirectInt8KVStorage
