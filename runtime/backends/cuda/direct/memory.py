"""Device memory as values: arrays without memory of their own, and the arena that lays them out."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from ....errors import ModelError
from ....tensors import DType

ALIGNMENT_BYTES = 256


class Array(Struct, frozen=True):
    """C-contiguous numbers at an address. Keeps nothing alive."""

    address: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def reshape(self, shape: tuple[int, ...]) -> Array:
        """The same numbers, as many, in another shape."""
        return Array(self.address, shape, self.dtype)

    def row(self, number: int) -> int:
        """The address of a row, an index of the first dimension."""
        return self.address + number * math.prod(self.shape[1:]) * self.dtype.size_bytes


class DeviceArena:
    """One stretch of device memory, handed out from its beginning. Nothing is given back: what has
    several uses is one array.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self._begin = self._next = address
        self._end = address + size_bytes
        self.arrays: dict[str, Array] = {}

    @classmethod
    def measure(cls, lay_out: Callable[[DeviceArena], object]) -> int:
        """The bytes that `lay_out` takes from an arena."""
        arena = cls(0, 1 << 62)
        lay_out(arena)
        return arena.used_bytes

    @property
    def used_bytes(self) -> int:
        return self._next - self._begin

    def take(self, name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array at a multiple of 256. Its content is undefined. Raises `ModelError`."""
        array = Array(self._next, shape, dtype)
        padded_bytes = -(-array.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._next + padded_bytes > self._end:
            raise ModelError(
                f"{name} {list(shape)} {dtype.label} takes {padded_bytes:,} bytes of the device's arena, which has "
                f"{self._end - self._next:,} left",
                hint="Serve fewer sequences at a time (--max-running) or shorter steps.",
            )
        assert name not in self.arrays, f"{name} is taken twice"
        self.arrays[name] = array
        self._next += padded_bytes
        return array

    def check_integrity(self) -> None:
        """Raise AssertionError if arrays overlap or leave the arena. Tests run it."""
        last = self._begin
        for array in self.arrays.values():
            assert array.address >= last
            assert array.address % ALIGNMENT_BYTES == self._begin % ALIGNMENT_BYTES
            last = array.end
        assert last <= self._end
