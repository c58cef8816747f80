"""The direct path's kernels compiled for this machine's CPU, and arrays on the device without one.

With TENERAL_TEST_CUDA=1 in the environment, the device is a real one, and kernels are compiled by NVRTC: the tests of
the direct path then hold it to what they hold the CPU to.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.cuda_driver import COMPILER, HERE, CudaOnCpu, compiled

from teneral.loader.device.driver.base import CAPABILITY_MAJOR, CAPABILITY_MINOR, Driver
from teneral.loader.device.driver.open import open_driver
from teneral.runtime.backends.cuda.direct.compile import CompiledKernels
from teneral.runtime.backends.cuda.direct.device import DirectDevice
from teneral.runtime.backends.cuda.direct.memory import Array
from teneral.runtime.backends.cuda.direct.program import KernelSource
from teneral.runtime.backends.cuda.direct.sources import KernelModule
from teneral.runtime.tensors import DType

# What is computed with addresses that are not aligned as a GPU needs them ends the process.
CHECKS = (
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Werror",
)


ON_DEVICE = os.environ.get("TENERAL_TEST_CUDA") == "1"
needs_kernels = pytest.mark.skipif(COMPILER is None and not ON_DEVICE, reason="no C++ compiler")
needs_double = pytest.mark.skipif(
    ON_DEVICE or COMPILER is None, reason="the device's memory is not the host's"
)


def open_device() -> DirectDevice:
    driver = open_driver(0) if ON_DEVICE else cuda().driver()
    return DirectDevice(driver, kernel_source(driver))


def kernel_source(driver: Driver) -> KernelSource:
    if not ON_DEVICE:
        return CpuSource()
    architecture = 10 * driver.attribute(CAPABILITY_MAJOR) + driver.attribute(CAPABILITY_MINOR)
    return CompiledKernels(architecture, [Path(tempfile.gettempdir()) / "teneral-kernels"])


@cache
def cuda() -> CudaOnCpu:
    """One a process."""
    return CudaOnCpu(Path(tempfile.mkdtemp(prefix="libcuda-")))


class CpuSource:
    """A `KernelSource`: the sources compiled behind `on_cpu.h`."""

    def image(self, module: KernelModule) -> bytes:
        return image_of(module)


@cache
def image_of(module: KernelModule) -> bytes:
    text = f'#include "{HERE / "on_cpu.h"}"\n{module.text}'
    return compiled(f"{module.name}-{module.dtype.value}", text, *CHECKS).read_bytes()


class Device:
    """A driver with a stream, and arrays that go there and back."""

    def __init__(self, dtype: DType = DType.BF16) -> None:
        device = open_device()
        self.driver, self.stream, self.kernels = device.driver, device.stream, device.kernels(dtype)
        self._taken: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        size_bytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.size_bytes)
        self._taken.append(self.driver.alloc(size_bytes))
        return Array(self._taken[-1], shape, dtype)

    def put(self, numbers: npt.NDArray[Any], dtype: DType | None = None) -> Array:
        """BF16 as uint16."""
        numbers = np.ascontiguousarray(numbers)
        array = self.empty(numbers.shape, dtype or _DTYPES[numbers.dtype.str])
        assert array.size_bytes == numbers.nbytes
        if numbers.nbytes:
            self.driver.copy_in(array.address, numbers.ctypes.data, numbers.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        return array

    def get(self, array: Array) -> npt.NDArray[Any]:
        numbers = np.empty(array.shape, array.dtype.numpy)
        if numbers.nbytes:
            self.driver.copy_out(numbers.ctypes.data, array.address, numbers.nbytes, self.stream)
        self.driver.synchronize_stream(self.stream)
        return numbers

    def run(
        self,
        module: str,
        kernel: str,
        grid: tuple[int, ...],
        block: int,
        arguments: Any,
        *,
        shared_bytes: int = 0,
    ) -> None:
        launch = self.kernels.launch(module, kernel, grid, block, arguments, shared_bytes=shared_bytes)
        self.driver.launch(launch, self.stream)

    def close(self) -> None:
        self.driver.synchronize_stream(self.stream)
        for address in self._taken:
            self.driver.free(address)
        self._taken.clear()


_DTYPES = {
    np.dtype(dtype.numpy).str: dtype
    for dtype in (
        DType.BF16,
        DType.F16,
        DType.F32,
        DType.F64,
        DType.I8,
        DType.U8,
        DType.U32,
        DType.I32,
        DType.I64,
    )
}
