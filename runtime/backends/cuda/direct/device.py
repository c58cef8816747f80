"""A device as the direct path uses it: its driver, the one stream that steps run on, its kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .....loader.device.detect import index_of
from .....loader.device.driver.base import (
    CAPABILITY_MAJOR,
    CAPABILITY_MINOR,
    NUM_PROCESSORS,
    CudaError,
    Driver,
)
from .....loader.device.driver.open import open_driver
from .....loader.errors import InsufficientMemoryError
from ....tensors import DType
from .compile import CompiledKernels
from .memory import Array
from .program import Kernels, KernelSource

NAME = "cuda"  # of executors


class OutOfMemoryError(InsufficientMemoryError):
    """The device's memory ran out in a step, which may be tried again with less."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise `OutOfMemoryError` for the driver's error."""
    try:
        yield
    except CudaError as error:
        if error.is_out_of_memory:
            raise OutOfMemoryError(error.message, hint=error.hint) from None
        raise


def open_direct_device(name: str, folders: Sequence[Path]) -> DirectDevice:
    """Open a device named like "cuda:0"; compiled kernels are read from the folders, and kept in the last one.
    Raises `CudaError`.
    """
    driver = open_driver(index_of(name))
    architecture = 10 * driver.attribute(CAPABILITY_MAJOR) + driver.attribute(CAPABILITY_MINOR)
    return DirectDevice(driver, CompiledKernels(architecture, folders))


class DirectDevice:
    """One device. Made once a process; the stream is used by one thread at a time."""

    def __init__(self, driver: Driver, source: KernelSource) -> None:
        """Raises `CudaError`."""
        self.driver = driver
        self.source = source
        self.stream = driver.stream()
        self.num_processors = driver.attribute(NUM_PROCESSORS)
        self.architecture = 10 * driver.attribute(CAPABILITY_MAJOR) + driver.attribute(CAPABILITY_MINOR)
        self._kernels: dict[DType, Kernels] = {}

    @property
    def name(self) -> str:
        return self.driver.name

    def kernels(self, dtype: DType) -> Kernels:
        """The kernels for activations of this dtype."""
        if dtype not in self._kernels:
            self._kernels[dtype] = Kernels(self.driver, self.source, dtype)
        return self._kernels[dtype]

    def read(self, array: Array, into: int) -> None:
        """Copy an array to the host's memory at `into`. Blocks until the stream's work is done."""
        if array.size_bytes:
            self.driver.copy_out(into, array.address, array.size_bytes, self.stream)
        self.driver.synchronize_stream(self.stream)
