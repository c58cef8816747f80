"""The contract of `Driver`, which both implementations pass, over a driver's library on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.cuda_driver import (
    COMPILER,
    HERE,
    CudaOnCpu,
    CupyDriver,
    CupyRuntime,
    compiled,
    names_used,
)

from teneral.loader.device.driver.base import (
    CAPABILITY_MAJOR,
    NUM_PROCESSORS,
    CudaError,
    Driver,
    KernelLaunch,
    KernelParameters,
)
from teneral.loader.device.driver.bindings import BindingsDriver
from teneral.loader.device.driver.libcuda import LibcudaDriver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = """
struct Add { float* values; unsigned count; float by; };
KERNEL(add, Add, 256) {
  __shared__ float own[256];
  unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  own[threadIdx.x] = at < args.count ? args.values[at] : 0;
  __syncthreads();
  if (at < args.count) args.values[at] = own[threadIdx.x] + args.by;
}
"""


class Add(ctypes.Structure):
    _fields_ = (("values", ctypes.c_uint64), ("count", ctypes.c_uint32), ("by", ctypes.c_float))


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> CudaOnCpu:
    return CudaOnCpu(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def image() -> bytes:
    return compiled("add", f'#include "{HERE / "on_cpu.h"}"\n{KERNELS}').read_bytes()


def _bindings(cuda: CudaOnCpu) -> Driver:
    runtime, driver = cuda.modules()
    return BindingsDriver(0, runtime=runtime, driver=driver)


@pytest.fixture(params=[CudaOnCpu.driver, _bindings], ids=["libcuda", "bindings"])
def driver(cuda: CudaOnCpu, request: pytest.FixtureRequest) -> Iterator[Driver]:
    before = cuda.library.memory_in_use()
    yield request.param(cuda)
    cuda.lose(0)
    cuda.library.set_memory(1 << 30)
    assert cuda.library.memory_in_use() == before, "a test left memory on the device"


class Rig:
    """Some floats on the device, and a kernel that adds to them."""

    def __init__(self, driver: Driver, image: bytes, count: int = 1000) -> None:
        self.driver = driver
        self.host = np.arange(count, dtype=np.float32)
        self.back = np.full(count, -1, np.float32)
        self.stream = driver.stream()
        self.address = driver.alloc(self.host.nbytes)
        self.function = driver.function(driver.module(image), "add")
        driver.copy_in(self.address, self.host.ctypes.data, self.host.nbytes, self.stream)

    def add(self, by: float) -> KernelLaunch:
        parameters = KernelParameters(Add(self.address, self.host.size, by))
        return KernelLaunch(self.function, (-(-self.host.size // 256), 1, 1), 256, 0, parameters)

    def read(self, stream: int | None = None) -> None:
        stream = self.stream if stream is None else stream
        self.driver.copy_out(self.back.ctypes.data, self.address, self.back.nbytes, stream)


@pytest.fixture
def rig(driver: Driver, image: bytes) -> Iterator[Rig]:
    rig = Rig(driver, image)
    yield rig
    driver.free(rig.address)


def test_the_device_is_described(driver: Driver) -> None:
    assert driver.name == "cuda:0"
    assert driver.attribute(CAPABILITY_MAJOR) == 9
    assert driver.attribute(NUM_PROCESSORS) == 4
    free_bytes, total_bytes = driver.memory()
    assert 0 < free_bytes <= total_bytes == 1 << 30


def test_a_launch_runs_behind_the_copies_before_it(rig: Rig) -> None:
    rig.driver.launch(rig.add(0.5), rig.stream)
    rig.read()
    rig.driver.synchronize_stream(rig.stream)
    np.testing.assert_array_equal(rig.back, rig.host + 0.5)


def test_queued_work_is_done_only_once_it_is_waited_for(rig: Rig) -> None:
    rig.read()
    event = rig.driver.event()
    rig.driver.record(event, rig.stream)
    assert rig.back[0] == -1
    rig.driver.synchronize(event)
    assert rig.driver.is_done(event)
    np.testing.assert_array_equal(rig.back, rig.host)
    rig.driver.free_event(event)


def test_an_event_becomes_done_by_itself(rig: Rig) -> None:
    event = rig.driver.event(sleeps=True)
    rig.read()
    rig.driver.record(event, rig.stream)
    for _ in range(1000):
        if rig.driver.is_done(event):
            break
    np.testing.assert_array_equal(rig.back, rig.host)


def test_a_stream_waits_for_an_event_of_another(rig: Rig) -> None:
    event, other = rig.driver.event(), rig.driver.stream()
    rig.driver.launch(rig.add(2.0), rig.stream)
    rig.driver.record(event, rig.stream)
    rig.driver.launch(rig.add(100.0), rig.stream)  # behind the event
    rig.driver.wait(other, event)
    rig.read(other)
    rig.driver.synchronize_stream(other)
    np.testing.assert_array_equal(rig.back, rig.host + 2.0)
    rig.driver.synchronize_stream(rig.stream)


def test_a_launch_copies_its_parameters(rig: Rig) -> None:
    launch = rig.add(1.0)
    rig.driver.launch(launch, rig.stream)
    launch.parameters.structure.by = 10.0
    rig.driver.launch(launch, rig.stream)
    rig.read()
    rig.driver.synchronize_stream(rig.stream)
    np.testing.assert_array_equal(rig.back, rig.host + 11.0)


def test_a_graph_runs_its_launches_in_order_each_time(rig: Rig) -> None:
    graph = rig.driver.graph([rig.add(1.0), rig.add(2.0), rig.add(3.0)])
    rig.read()
    rig.driver.synchronize_stream(rig.stream)
    np.testing.assert_array_equal(rig.back, rig.host)  # making it ran nothing
    for _ in range(3):
        rig.driver.launch_graph(graph, rig.stream)
    rig.read()
    rig.driver.synchronize_stream(rig.stream)
    np.testing.assert_array_equal(rig.back, rig.host + 18.0)
    rig.driver.free_graph(graph)


def test_fill_and_copy_within_the_device(rig: Rig) -> None:
    half = rig.host.nbytes // 2
    rig.driver.fill(rig.address, 0, half, rig.stream)
    rig.driver.copy(rig.address + half, rig.address, half, rig.stream)
    rig.read()
    rig.driver.synchronize_stream(rig.stream)
    assert not rig.back.any()


def test_pinned_memory_of_the_driver_and_of_the_caller(driver: Driver) -> None:
    address = driver.alloc_host(8192)
    ctypes.memset(address, 7, 8192)
    driver.free_host(address)
    pages = np.zeros(8192, np.uint8)
    driver.pin(pages.ctypes.data, pages.nbytes)
    with pytest.raises(CudaError, match="HOST_MEMORY_ALREADY_REGISTERED"):
        driver.pin(pages.ctypes.data, pages.nbytes)
    driver.unpin(pages.ctypes.data)
    with pytest.raises(CudaError, match="HOST_MEMORY_NOT_REGISTERED"):
        driver.unpin(pages.ctypes.data)


def test_other_threads_may_use_the_driver(rig: Rig) -> None:
    def work() -> None:
        rig.driver.launch(rig.add(5.0), rig.stream)
        rig.read()
        rig.driver.synchronize_stream(rig.stream)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(rig.back, rig.host + 5.0)


def test_memory_that_is_not_there_is_refused_with_what_to_do(cuda: CudaOnCpu, driver: Driver) -> None:
    with pytest.raises(CudaError, match=r"cuda:0 failed while allocating 1,099,511,627,776 bytes") as raised:
        driver.alloc(1 << 40)
    assert raised.value.is_out_of_memory
    assert not raised.value.is_lost
    assert "quantised" in raised.value.hint
    driver.free(driver.alloc(1))  # nothing was lost


def test_more_shared_memory_than_there_is_is_refused(driver: Driver, image: bytes) -> None:
    module = driver.module(image)
    driver.function(module, "add", shared_bytes=100 << 10)
    with pytest.raises(CudaError, match=r"shared memory|kernel add"):
        driver.function(module, "add", shared_bytes=400 << 10)


def test_binaries_that_are_none_and_kernels_that_are_not_there(driver: Driver, image: bytes) -> None:
    with pytest.raises(CudaError, match=r"loading kernels: CUDA_ERROR_INVALID_IMAGE \(200\)\n  Compile"):
        driver.module(b"\0" * 64)
    with pytest.raises(CudaError, match="finding the kernel multiply"):
        driver.function(driver.module(image), "multiply")


def test_a_launch_with_an_impossible_grid_is_refused(rig: Rig) -> None:
    with pytest.raises(CudaError, match="launching a kernel: CUDA_ERROR_INVALID_VALUE"):
        rig.driver.launch(rig.add(1.0)._replace(block=2048), rig.stream)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        rig.driver.graph([rig.add(1.0)._replace(grid=(0, 1, 1))])


CALLS: dict[str, tuple[str, Callable[[Rig], Any]]] = {
    "copying to it": ("cuMemcpyHtoDAsync_v2", lambda rig: rig.driver.copy_in(rig.address, rig.address, 4, rig.stream)),
    "copying from it": ("cuMemcpyDtoHAsync_v2", lambda rig: rig.read()),
    "computing": ("cuStreamSynchronize", lambda rig: rig.driver.synchronize_stream(rig.stream)),
    "launching a kernel": ("cuLaunchKernel", lambda rig: rig.driver.launch(rig.add(1.0), rig.stream)),
    "making a stream": ("cuStreamCreate", lambda rig: rig.driver.stream()),
    "making an event": ("cuEventCreate", lambda rig: rig.driver.event()),
    "asking for its memory": ("cuMemGetInfo_v2", lambda rig: rig.driver.memory()),
    "pinning 4,096 bytes": ("cuMemHostRegister_v2", lambda rig: rig.driver.pin(rig.host.ctypes.data, 4096)),
}  # fmt: skip


@pytest.mark.parametrize("doing", CALLS)
def test_each_error_says_what_failed_and_whether_the_device_is_lost(
    cuda: CudaOnCpu, rig: Rig, doing: str
) -> None:
    function, call = CALLS[doing]
    for code, is_lost in ((719, True), (999, True), (214, True), (1, False), (12345, False)):
        cuda.fail_next(function, code)
        with pytest.raises(CudaError) as raised:
            call(rig)
        assert f"cuda:0 failed while {doing}: CUDA" in raised.value.message
        assert (raised.value.code, raised.value.is_lost) == (code, is_lost)
        assert raised.value.hint


def test_after_a_lost_device_every_call_says_so(cuda: CudaOnCpu, rig: Rig) -> None:
    cuda.lose(700)
    for call in (rig.read, rig.driver.memory, lambda: rig.driver.synchronize_stream(rig.stream)):
        with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS \(700\)\n  `nvidia-smi`") as raised:
            call()
        assert raised.value.is_lost
    cuda.lose(0)


def test_a_device_that_is_not_there(cuda: CudaOnCpu) -> None:
    with pytest.raises(CudaError, match=r"cuda:3 failed while opening it: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        LibcudaDriver(3, library=cuda.path)
    runtime, module = cuda.modules()
    with pytest.raises(CudaError, match="cuda:3 failed while opening it"):
        BindingsDriver(3, runtime=runtime, driver=module)


def test_without_a_driver_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=r"failed while loading its library: .*\n  Give the container a GPU"):
        LibcudaDriver(0, library=str(tmp_path / "libcuda.so.1"))


def test_cupys_bindings_have_the_names_that_are_used() -> None:
    driver = pytest.importorskip("cupy_backends.cuda.api.driver")
    from cupy_backends.cuda.api import runtime

    assert [name for name in names_used(CupyRuntime) if not hasattr(runtime, name)] == []
    assert [name for name in names_used(CupyDriver) if not hasattr(driver, name)] == []


def test_importing_the_drivers_imports_nothing_else() -> None:
    program = (
        "import sys; from teneral.loader.device.driver import bindings, libcuda, open; "
        "print([name for name in ('numpy', 'cupy', 'cupy_backends', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
