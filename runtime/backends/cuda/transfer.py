"""Small copies between host and device through pinned memory.

Uploads rotate among several buffers: filling one must not wait for the copy of another, which waits
for a step. On a CPU, where tests run, there are no copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]

MIN_NUMBERS = 1 << 12
NUM_ROOMS = 8  # more than a step sends


class _Pinned:
    """A pinned host buffer of int64, and the event that ends its last copy."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.int64)
        self.copied: torch.cuda.Event | None = None

    def at_least(self, size: int) -> torch.Tensor:
        """The buffer with at least `size` numbers. May wait for its previous copy."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.tensor) < size:
            room = max(MIN_NUMBERS, 1 << (size - 1).bit_length())
            self.tensor = torch.empty(room, dtype=torch.int64, pin_memory=True)
        return self.tensor[:size]


class Uplink:
    """Copies to the device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms = [_Pinned() for _ in range(NUM_ROOMS if device.type == "cuda" else 0)]
        self._turn = 0

    def send(self, parts: Sequence[Numbers], into: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Send the parts, as views of one tensor: a new one, or the beginning of `into`. Does not
        wait.
        """
        sizes = [len(part) for part in parts]
        size = sum(sizes)
        if not self._rooms:
            together = torch.from_numpy(np.concatenate(parts))
            target = together if into is None else into[:size].copy_(together)
        else:
            self._turn = (self._turn + 1) % NUM_ROOMS
            room = self._rooms[self._turn]
            host = room.at_least(size)
            np.concatenate(parts, out=host.numpy())
            target = torch.empty(size, dtype=torch.int64, device=self.device) if into is None else into[:size]
            target.copy_(host, non_blocking=True)
            if room.copied is None:
                room.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            room.copied.record()
        return target.split_with_sizes(sizes)


class Downlink:
    """Copies to the host, the one wait of a step. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.float64)
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, numbers: torch.Tensor) -> npt.NDArray[np.float64]:
        """(N,) float64, once all work enqueued on the stream before is done. Valid until the next
        call.
        """
        if self._done is None:
            return numbers.numpy()
        if len(self._room) < len(numbers):
            self._room = torch.empty(max(1024, 2 * len(numbers)), dtype=torch.float64, pin_memory=True)
        host = self._room[: len(numbers)]
        host.copy_(numbers, non_blocking=True)
        self.wait()
        return host.numpy()

    def wait(self) -> None:
        """Wait until all work enqueued on the stream is done."""
        if self._done is not None:
            self._done.record()
            self._done.synchronize()


def bits(values: Sequence[float]) -> Numbers:
    """Floats as int64 bits, to share a copy with integers; `as_floats` is the reverse."""
    return np.array(values, dtype=np.float64).view(np.int64)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) int64 from `bits` → float64."""
    return tensor.view(torch.float64)
