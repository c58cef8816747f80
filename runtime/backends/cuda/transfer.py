"""Small copies between host and device, through memory that the device can reach by itself.

Several buffers take turns on the way up: filling one must not wait for the copy of another, which waits for a step. On
a CPU, where tests run, there is nothing to copy through.
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
    """Room for int64 on the host, and when the last copy from it was over."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.int64)
        self.copied: torch.cuda.Event | None = None

    def at_least(self, size: int) -> torch.Tensor:
        """May wait for the copy before."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.tensor) < size:
            room = max(MIN_NUMBERS, 1 << (size - 1).bit_length())
            self.tensor = torch.empty(room, dtype=torch.int64, pin_memory=True)
        return self.tensor[:size]


class Uplink:
    """One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms = [_Pinned() for _ in range(NUM_ROOMS if device.type == "cuda" else 0)]
        self._turn = 0

    def send(self, parts: Sequence[Numbers], into: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Each part on the device, views of one tensor: a new one, or the beginning of `into`. Waits for none."""
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
    """The one wait of a step. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.float64)
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, numbers: torch.Tensor) -> npt.NDArray[np.float64]:
        """(N,) float64, once all is done that was put on the stream before. Valid until the next call."""
        if self._done is None:
            return numbers.numpy()
        if len(self._room) < len(numbers):
            self._room = torch.empty(max(1024, 2 * len(numbers)), dtype=torch.float64, pin_memory=True)
        host = self._room[: len(numbers)]
        host.copy_(numbers, non_blocking=True)
        self.wait()
        return host.numpy()

    def wait(self) -> None:
        """Until all is done that was put on the stream."""
        if self._done is not None:
            self._done.record()
            self._done.synchronize()


def bits(values: Sequence[float]) -> Numbers:
    """Floats as they can travel among integers; `as_floats` has them again."""
    return np.array(values, dtype=np.float64).view(np.int64)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) int64 from `bits` → float64."""
    return tensor.view(torch.float64)
