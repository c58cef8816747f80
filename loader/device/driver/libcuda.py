"""A `Driver` over the driver's library itself, by ctypes: nothing to install, nothing to import."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from .base import NOT_READY, SUCCESS, UNASKED_SHARED_BYTES, CudaError, KernelLaunch

LIBRARY = "libcuda.so.1"

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_SLEEPS, _WITHOUT_TIME = 1, 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_P, _U, _SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDeviceGet": (_P, ctypes.c_int),
    "cuDeviceGetAttribute": (_P, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_P, ctypes.c_int),
    "cuCtxSetCurrent": (_P,),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemAlloc_v2": (_P, _SIZE),
    "cuMemFree_v2": (_P,),
    "cuMemHostAlloc": (_P, _SIZE, _U),
    "cuMemFreeHost": (_P,),
    "cuMemHostRegister_v2": (_P, _SIZE, _U),
    "cuMemHostUnregister": (_P,),
    "cuMemcpyHtoDAsync_v2": (_P, _P, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _P, _SIZE, _P),
    "cuMemcpyDtoDAsync_v2": (_P, _P, _SIZE, _P),
    "cuMemsetD8Async": (_P, ctypes.c_ubyte, _SIZE, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamSynchronize": (_P,),
    "cuEventCreate": (_P, _U),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuEventSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _U),
    "cuModuleLoadData": (_P, ctypes.c_char_p),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuFuncSetAttribute": (_P, ctypes.c_int, ctypes.c_int),
    # function; grid; block; shared bytes; stream; parameters; extra
    "cuLaunchKernel": (_P, *[_U] * 7, _P, _P, _P),
    "cuGraphCreate": (_P, _U),
    # graph's new node; graph; dependencies and their number; the kernel
    "cuGraphAddKernelNode_v2": (_P, _P, _P, _SIZE, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
}


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", _P),
        ("grid", _U * 3),
        ("block", _U * 3),
        ("shared_bytes", _U),
        ("parameters", _P),
        ("extra", _P),
        ("kernel", _P),
        ("context", _P),
    )


class LibcudaDriver:
    """See `base.Driver`. The context is the device's primary one, which CuPy and torch share."""

    def __init__(self, index: int = 0, *, library: str = LIBRARY) -> None:
        """Open the device: makes its context, some tenths of a second. Raises `CudaError`."""
        self.name = f"cuda:{index}"
        self._cuda: dict[str, Any] = {}
        try:
            loaded = ctypes.CDLL(library)
            for name, types in _SIGNATURES.items():
                function = self._cuda[name] = getattr(loaded, name)
                function.argtypes, function.restype = types, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise CudaError(0, "loading its library", why=str(error)) from error
        self._launch = self._cuda["cuLaunchKernel"]
        self._call("initialising", "cuInit", 0)
        device = ctypes.c_int()
        self._call("opening it", "cuDeviceGet", ctypes.byref(device), index)
        self._device = device.value
        self._context = self._made("opening it", "cuDevicePrimaryCtxRetain", self._device)
        self._entered = threading.local()

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("describing it", "cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def memory(self) -> tuple[int, int]:
        free, total = _SIZE(), _SIZE()
        self._in_context("asking for its memory", "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def alloc(self, size_bytes: int) -> int:
        self._enter()
        return self._made(f"allocating {size_bytes:,} bytes", "cuMemAlloc_v2", size_bytes)

    def free(self, address: int) -> None:
        self._in_context("freeing memory", "cuMemFree_v2", address)

    def alloc_host(self, size_bytes: int) -> int:
        self._enter()
        return self._made(
            f"allocating {size_bytes:,} bytes of pinned memory", "cuMemHostAlloc", size_bytes, _PORTABLE
        )

    def free_host(self, address: int) -> None:
        self._in_context("freeing pinned memory", "cuMemFreeHost", address)

    def pin(self, address: int, size_bytes: int) -> None:
        self._in_context(
            f"pinning {size_bytes:,} bytes", "cuMemHostRegister_v2", address, size_bytes, _PORTABLE
        )

    def unpin(self, address: int) -> None:
        self._in_context("unpinning memory", "cuMemHostUnregister", address)

    def copy_in(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self._in_context("copying to it", "cuMemcpyHtoDAsync_v2", to, source, size_bytes, stream)

    def copy_out(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self._in_context("copying from it", "cuMemcpyDtoHAsync_v2", to, source, size_bytes, stream)

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self._in_context("copying in it", "cuMemcpyDtoDAsync_v2", to, source, size_bytes, stream)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        self._in_context("filling memory", "cuMemsetD8Async", address, byte, size_bytes, stream)

    def stream(self) -> int:
        self._enter()
        return self._made("making a stream", "cuStreamCreate", _NON_BLOCKING)

    def synchronize_stream(self, stream: int) -> None:
        self._in_context("computing", "cuStreamSynchronize", stream)

    def event(self, *, sleeps: bool = False) -> int:
        self._enter()
        return self._made("making an event", "cuEventCreate", _WITHOUT_TIME | (_SLEEPS if sleeps else 0))

    def free_event(self, event: int) -> None:
        self._in_context("freeing an event", "cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._in_context("recording an event", "cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._in_context("ordering streams", "cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        self._enter()
        code = self._cuda["cuEventQuery"](event)
        if code not in (SUCCESS, NOT_READY):
            raise CudaError(code, "computing", device=self.name)
        return bool(code == SUCCESS)

    def synchronize(self, event: int) -> None:
        self._in_context("computing", "cuEventSynchronize", event)

    def module(self, image: bytes) -> int:
        self._enter()
        return self._made("loading kernels", "cuModuleLoadData", image)

    def function(self, module: int, name: str, *, shared_bytes: int = 0) -> int:
        self._enter()
        function = self._made(f"finding the kernel {name}", "cuModuleGetFunction", module, name.encode())
        if shared_bytes > UNASKED_SHARED_BYTES:
            doing = f"allowing {name} {shared_bytes:,} bytes of shared memory"
            self._call(doing, "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
        return function

    def launch(self, launch: KernelLaunch, stream: int) -> None:
        self._enter()
        function, grid, block, shared_bytes, parameters = launch
        code = self._launch(function, *grid, block, 1, 1, shared_bytes, stream, parameters.address, None)
        if code:
            raise CudaError(code, "launching a kernel", device=self.name)

    def graph(self, launches: Sequence[KernelLaunch]) -> int:
        self._enter()
        doing = f"making a graph of {len(launches)} kernels"
        graph = self._made(doing, "cuGraphCreate", 0)
        try:
            last = _P()
            for number, launch in enumerate(launches):
                node = _KernelNode(
                    launch.function,
                    launch.grid,
                    (launch.block, 1, 1),
                    launch.shared_bytes,
                    launch.parameters.address,
                )
                behind = _P(last.value)
                self._call(
                    doing,
                    "cuGraphAddKernelNode_v2",
                    ctypes.byref(last),
                    graph,
                    ctypes.byref(behind) if number else None,
                    min(number, 1),
                    ctypes.byref(node),
                )
            return self._made(doing, "cuGraphInstantiateWithFlags", graph, 0)
        finally:
            self._cuda["cuGraphDestroy"](graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._in_context("launching a graph", "cuGraphLaunch", graph, stream)

    def free_graph(self, graph: int) -> None:
        self._in_context("freeing a graph", "cuGraphExecDestroy", graph)

    def _enter(self) -> None:
        """Make the context current in this thread: a new thread has none."""
        if not hasattr(self._entered, "here"):
            self._call("opening it", "cuCtxSetCurrent", self._context)
            self._entered.here = True

    def _in_context(self, doing: str, name: str, *arguments: Any) -> None:
        self._enter()
        self._call(doing, name, *arguments)

    def _made(self, doing: str, name: str, *arguments: Any) -> int:
        """The handle or address that a function writes to its first argument."""
        made = _P()
        self._call(doing, name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, doing: str, name: str, *arguments: Any) -> None:
        code = self._cuda[name](*arguments)
        if code:
            raise CudaError(code, doing, device=self.name)
