"""A `Driver` over CuPy's own bindings, `cupy_backends.cuda.api`, which load neither CuPy nor numpy.

They are compiled, and release the GIL in each call. Opening takes 7 ms of imports where `import
cupy` takes 170.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .base import NOT_READY, SUCCESS, UNASKED_SHARED_BYTES, CudaError, KernelLaunch

_PORTABLE = 1
_NON_BLOCKING = 1
_SLEEPS, _WITHOUT_TIME = 1, 2
_IN, _OUT, _WITHIN = 1, 2, 3  # cudaMemcpyKind
_MAX_DYNAMIC_SHARED = 8
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads may allocate meanwhile


class BindingsDriver:
    """See `base.Driver`."""

    def __init__(self, index: int = 0, *, runtime: Any = None, driver: Any = None) -> None:
        """Open the device: makes its context, some tenths of a second.

        `runtime` and `driver` are the modules of `cupy_backends.cuda.api`, imported without them.
        Raises ImportError without CuPy, and `CudaError`.
        """
        if runtime is None:
            # lazy: only with a device
            runtime, driver = (
                import_module(f"cupy_backends.cuda.api.{name}") for name in ("runtime", "driver")
            )
        self.name = f"cuda:{index}"
        self._index = index
        self._runtime, self._driver = runtime, driver
        self._errors = (runtime.CUDARuntimeError, driver.CUDADriverError)
        self._entered = threading.local()
        self._graphs: dict[int, int] = {}
        with self._doing("opening it"):
            runtime.free(0)  # makes the context
        self._recording = self.stream()

    def attribute(self, number: int) -> int:
        with self._doing("describing it"):
            return int(self._runtime.deviceGetAttribute(number, self._index))

    def memory(self) -> tuple[int, int]:
        with self._doing("asking for its memory"):
            free, total = self._runtime.memGetInfo()
            return int(free), int(total)

    def alloc(self, size_bytes: int) -> int:
        with self._doing(f"allocating {size_bytes:,} bytes"):
            return int(self._runtime.malloc(size_bytes))

    def free(self, address: int) -> None:
        with self._doing("freeing memory"):
            self._runtime.free(address)

    def alloc_host(self, size_bytes: int) -> int:
        with self._doing(f"allocating {size_bytes:,} bytes of pinned memory"):
            return int(self._runtime.hostAlloc(size_bytes, _PORTABLE))

    def free_host(self, address: int) -> None:
        with self._doing("freeing pinned memory"):
            self._runtime.freeHost(address)

    def pin(self, address: int, size_bytes: int) -> None:
        with self._doing(f"pinning {size_bytes:,} bytes"):
            self._runtime.hostRegister(address, size_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        with self._doing("unpinning memory"):
            self._runtime.hostUnregister(address)

    def copy_in(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        with self._doing("copying to it"):
            self._runtime.memcpyAsync(to, source, size_bytes, _IN, stream)

    def copy_out(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        with self._doing("copying from it"):
            self._runtime.memcpyAsync(to, source, size_bytes, _OUT, stream)

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        with self._doing("copying in it"):
            self._runtime.memcpyAsync(to, source, size_bytes, _WITHIN, stream)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        with self._doing("filling memory"):
            self._runtime.memsetAsync(address, byte, size_bytes, stream)

    def stream(self) -> int:
        with self._doing("making a stream"):
            return int(self._runtime.streamCreateWithFlags(_NON_BLOCKING))

    def synchronize_stream(self, stream: int) -> None:
        with self._doing("computing"):
            self._runtime.streamSynchronize(stream)

    def event(self, *, sleeps: bool = False) -> int:
        with self._doing("making an event"):
            return int(self._runtime.eventCreateWithFlags(_WITHOUT_TIME | (_SLEEPS if sleeps else 0)))

    def free_event(self, event: int) -> None:
        with self._doing("freeing an event"):
            self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        with self._doing("recording an event"):
            self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._doing("ordering streams"):
            self._runtime.streamWaitEvent(stream, event, 0)

    def is_done(self, event: int) -> bool:
        with self._doing("computing"):
            code = int(self._runtime.eventQuery(event))
        if code not in (SUCCESS, NOT_READY):
            raise CudaError(code, "computing", device=self.name)
        return code == SUCCESS

    def synchronize(self, event: int) -> None:
        with self._doing("computing"):
            self._runtime.eventSynchronize(event)

    def module(self, image: bytes) -> int:
        with self._doing("loading kernels"):
            return int(self._driver.moduleLoadData(image))

    def function(self, module: int, name: str, *, shared_bytes: int = 0) -> int:
        with self._doing(f"finding the kernel {name}"):
            function = int(self._driver.moduleGetFunction(module, name))
            if shared_bytes > UNASKED_SHARED_BYTES:
                self._driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
            return function

    def launch(self, launch: KernelLaunch, stream: int) -> None:
        function, grid, block, shared_bytes, parameters = launch
        try:  # not `_doing`, which takes a third of a launch's time
            self._enter()
            self._driver.launchKernel(
                function, *grid, block, 1, 1, shared_bytes, stream, parameters.address, 0
            )
        except self._errors as error:
            raise self._translated(error, "launching a kernel") from error

    def graph(self, launches: Sequence[KernelLaunch]) -> int:
        """See `base.Driver`. The bindings make no nodes: the launches are captured on a stream of
        their own.
        """
        runtime = self._runtime
        with self._doing(f"making a graph of {len(launches)} kernels"):
            runtime.streamBeginCapture(self._recording, _THREAD_LOCAL)
            try:
                for launch in launches:
                    self.launch(launch, self._recording)
            finally:
                graph = runtime.streamEndCapture(self._recording)
            made = int(runtime.graphInstantiate(graph))
            self._graphs[made] = int(graph)
            return made

    def launch_graph(self, graph: int, stream: int) -> None:
        with self._doing("launching a graph"):
            self._runtime.graphLaunch(graph, stream)

    def free_graph(self, graph: int) -> None:
        with self._doing("freeing a graph"):
            self._runtime.graphExecDestroy(graph)
            self._runtime.graphDestroy(self._graphs.pop(graph))

    @contextmanager
    def _doing(self, doing: str) -> Iterator[None]:
        """This thread calls the bindings: the device is made current, errors are translated."""
        try:
            self._enter()
            yield
        except self._errors as error:
            raise self._translated(error, doing) from error

    def _enter(self) -> None:
        """Make the device current in this thread: a new thread has device 0."""
        if not hasattr(self._entered, "here"):
            self._runtime.setDevice(self._index)
            self._entered.here = True

    def _translated(self, error: Exception, doing: str) -> CudaError:
        return CudaError(int(getattr(error, "status", 999)), doing, device=self.name)
