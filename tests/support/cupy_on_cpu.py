"""The part of CuPy that `CudaDevice` uses, on this machine's CPU, so that each of its lines runs without a GPU.

Streams are threads, events are points in their work, device memory is the host's, and kernels are those of
`kernels_on_cpu`. It is as asynchronous as CUDA is, and as strict where that matters: what is launched, copied or waited
for on a stream that there is not fails. `NAMES` are what it stands in for; a test holds them against the real CuPy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import zstandard
from tests.support.kernels_on_cpu import KernelsOnCpu, aligned_zeros
from tests.support.simulated_device import SimulatedTicket, _Stream

from teneral.loader.device.image import Launch

NAMES = (
    "ndarray", "uint8", "RawModule", "cuda.Device", "cuda.Stream", "cuda.Event", "cuda.Memory", "cuda.MemoryPointer",
    "cuda.runtime.CUDARuntimeError", "cuda.driver.CUDADriverError", "cuda.runtime.free", "cuda.runtime.memGetInfo",
    "cuda.runtime.memcpy", "cuda.runtime.memcpyAsync", "cuda.runtime.hostRegister", "cuda.runtime.hostUnregister",
    "cuda.runtime.streamWaitEvent", "cuda.runtime.eventRecord", "cuda.runtime.memcpyHostToDevice",
    "cuda.runtime.memcpyDeviceToHost", "cuda.Device.compute_capability", "cuda.Stream.synchronize",
    "cuda.Stream.wait_event", "cuda.Event.record", "cuda.Event.synchronize", "cuda.Event.done", "cuda.Memory.ptr",
    "cuda.MemoryPointer.ptr", "RawModule.get_function", "ndarray.data",
)  # fmt: skip
H2D, D2H = 1, 2
BLOCKS = {"blake3_chunks": 128, "huf_frames": 32}
SIGNATURES = {"blake3_chunks": [8, 4, 8], "blake3_root": [8, 4, 8, 8], "huf_frames": [8, 4, 4, 8]}
HOST_REGISTER_FAILS = 1


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class DeviceArray(np.ndarray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class CupyOnCpu:
    """Stands for the module `cupy`."""

    def __init__(self, kernels: KernelsOnCpu, *, memory_bytes: int = 1 << 30, pins: bool = True) -> None:
        self._kernels = kernels
        self.memory_bytes, self._pins = memory_bytes, pins
        self.streams: dict[int, _Stream] = {}
        self.events: dict[int, SimulatedTicket] = {}
        self.current = threading.local()
        self.pinned: dict[int, int] = {}
        self.uint8 = np.uint8
        fake = self
        self.ndarray = lambda shape, dtype, memptr: memptr.array(shape[0])

        class Device:
            compute_capability = "90"

            def __init__(self, index: int) -> None:
                if index != 0:
                    raise CudaError(101)

            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        class Stream:
            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking
                self.ptr = fake.new_stream()

            def __enter__(self) -> None:
                fake.current.stream = self.ptr

            def __exit__(self, *_: object) -> None:
                fake.current.stream = None

            def synchronize(self) -> None:
                fake.streams[self.ptr].record().wait()

            def wait_event(self, event: Any) -> None:
                fake.wait_event(self.ptr, event.ptr)

        class Event:
            def __init__(self, *, block: bool = False, disable_timing: bool = False) -> None:
                self.ptr = len(fake.events) + 1
                fake.events[self.ptr] = SimulatedTicket()

            def record(self, stream: Any) -> None:
                fake.record(self.ptr, stream.ptr)

            def synchronize(self) -> None:
                fake.events[self.ptr].wait()

            @property
            def done(self) -> bool:
                return fake.events[self.ptr].is_done()

        class Memory:
            def __init__(self, size_bytes: int) -> None:
                if size_bytes > fake.memory_bytes:
                    raise CudaError(2)
                self.bytes = aligned_zeros(size_bytes)
                self.ptr = self.bytes.ctypes.data

        class MemoryPointer:
            def __init__(self, memory: Memory, offset: int) -> None:
                self._memory, self.ptr = memory, memory.ptr + offset

            def array(self, size: int) -> np.ndarray:
                return self._memory.bytes[:size].view(DeviceArray)

        runtime = SimpleNamespace(
            CUDARuntimeError=CudaError,
            memcpyHostToDevice=H2D,
            memcpyDeviceToHost=D2H,
            free=lambda pointer: None,
            memGetInfo=lambda: (self.memory_bytes, self.memory_bytes),
            memcpy=lambda to, source, size, kind: ctypes.memmove(to, source, size),
            memcpyAsync=self._copy,
            hostRegister=self._pin,
            hostUnregister=lambda address: self.pinned.pop(address),
            streamWaitEvent=lambda stream, event, flags: self.wait_event(stream, event),
            eventRecord=self.record,
        )
        driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {}))
        self.cuda = SimpleNamespace(
            runtime=runtime, driver=driver, Device=Device, Stream=Stream, Event=Event, Memory=Memory,
            MemoryPointer=MemoryPointer,
        )  # fmt: skip

    def RawModule(self, *, path: str) -> Any:
        return SimpleNamespace(get_function=lambda name: lambda *given: self._launch(name, *given))

    def new_stream(self) -> int:
        number = 1000 + len(self.streams)
        self.streams[number] = _Stream(f"cuda-{number}")
        return number

    def launch(self, stream: int, work: Any) -> None:
        self.streams[stream].launch(work)

    def record(self, event: int, stream: int) -> None:
        """An event may be waited for once it was recorded: CUDA takes one that was not for done."""
        ticket = self.events[event]
        self.streams[stream].launch(lambda: ticket.finish(None))

    def wait_event(self, stream: int, event: int) -> None:
        self.streams[stream].launch(self.events[event].wait)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.end()

    @contextmanager
    def busy(self, stream: int) -> Iterator[None]:
        free = threading.Event()
        self.launch(stream, lambda: (free.wait(), None)[1])
        yield
        free.set()

    def _copy(self, to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        assert kind in (H2D, D2H)
        self.launch(stream, lambda: (ctypes.memmove(to, source, size_bytes), None)[1])

    def _pin(self, address: int, size_bytes: int, flags: int) -> None:
        if not self._pins:
            raise CudaError(HOST_REGISTER_FAILS)
        self.pinned[address] = size_bytes

    def _launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> None:
        assert block == (BLOCKS.get(name, 256),)
        sizes = [argument.itemsize for argument in arguments]
        if name in SIGNATURES:
            assert sizes == SIGNATURES[name]
            given = list(map(int, arguments))
            if name == "blake3_chunks":
                work = lambda: self._kernels.hash_chunks_at(grid[0], *given)  # noqa: E731 - launched later
            elif name == "blake3_root":
                work = lambda: self._kernels.hash_root_at(*given)  # noqa: E731
            else:
                work = lambda: self._kernels.decode_at(grid[0], *given)  # noqa: E731
        elif name == "resolve_chunks":
            assert sizes == [8, 4, 4, 8, 8, 8, 8]
            work = lambda: self._kernels.resolve_at(*map(int, arguments))  # noqa: E731 - launched later
        else:
            assert sizes == [8, 4, 4, 8, 8]
            image, table, num, weights, wrong = map(int, arguments)
            pair = (grid[0], grid[1] if len(grid) > 1 else 1)
            work = lambda: self._kernels.run_at(Launch(name, table, num), image, weights, wrong, grid=pair)  # noqa: E731
        self.launch(self.current.stream, work)


class ZstdOnCpu:
    """Stands for `nvcomp.Decompressor`: the same arrays, read as nvCOMP reads them."""

    def __init__(self, cupy: CupyOnCpu, *, fails: bool = False) -> None:
        self._cupy, self._fails = cupy, fails

    def scratch_bytes(self, num: int, total_bytes: int) -> int:
        return 3 * total_bytes

    def launch(self, chunks: int, num: int, scratch: int, scratch_bytes: int, stream: int) -> None:
        assert chunks % 8 == 0
        self._cupy.launch(stream, lambda: self._decompress(chunks, num))

    def _decompress(self, chunks: int, num: int) -> None:
        arrays = np.ctypeslib.as_array((ctypes.c_uint64 * (5 * num)).from_address(chunks)).reshape(5, num)
        statuses = np.ctypeslib.as_array((ctypes.c_int32 * num).from_address(chunks + 40 * num))
        for chunk, (coded, coded_bytes, decoded, decoded_bytes) in enumerate(arrays[:4].T.tolist()):
            content = zstandard.ZstdDecompressor().decompress(ctypes.string_at(coded, coded_bytes))
            assert coded % 8 == 0
            assert len(content) == decoded_bytes
            ctypes.memmove(decoded, content, len(content))
            arrays[4, chunk] = len(content)
            statuses[chunk] = 12 if self._fails else 0
