"""A CUDA driver without a device: `libcuda_on_cpu.cpp` compiled, behind both kinds of `Driver`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.load import patience_s

from teneral.loader.device.driver.libcuda import LibcudaDriver

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # modules are ELF files


def compile_library(source: Path, library: Path, *options: str) -> Path:
    """Compile C++ to a shared library, some seconds."""
    assert COMPILER is not None
    command = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=off",
        *options,
    ]
    subprocess.run([*command, "-o", library, source, "-ldl"], check=True, timeout=patience_s(200))
    return library


def compiled(name: str, text: str, *options: str) -> Path:
    """A shared library of this source, compiled once for all processes of a machine, by all that it is made of."""
    header = (HERE / "on_cpu.h").read_text(encoding="utf-8")
    digest = hashlib.sha256(repr((text, header, options, COMPILER)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "teneral-on-cpu"
    folder.mkdir(exist_ok=True)
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        source = library.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(text, encoding="utf-8")
        compile_library(source, source.with_suffix(".so"), *options).replace(library)
        source.unlink()
    return library


class CudaOnCpu:
    """The library, with the switches for tests. One a process: its device keeps its state."""

    def __init__(self, folder: Path) -> None:
        """A copy in `folder`, as a library that is opened twice has one state."""
        source = (HERE / "libcuda_on_cpu.cpp").read_text(encoding="utf-8")
        self.path = str(shutil.copy(compiled("libcuda", source), folder / "libcuda.so"))
        self.library = ctypes.CDLL(self.path)
        self.library.set_memory.argtypes = [ctypes.c_size_t]
        self.library.memory_in_use.restype = ctypes.c_size_t
        self.library.launches_run.restype = ctypes.c_uint64

    def fail_next(self, function: str, code: int) -> None:
        """The next call of this function fails with this code."""
        self.library.fail_next(function.encode(), code)

    def lose(self, code: int) -> None:
        """Every call fails with this code; 0: none does."""
        self.library.lose(code)

    def driver(self) -> LibcudaDriver:
        return LibcudaDriver(0, library=self.path)

    def modules(self) -> tuple[Any, Any]:
        """Stand-ins for CuPy's modules `runtime` and `driver`."""
        return CupyRuntime(self.library), CupyDriver(self.library)


class CupyError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _signed(number: int) -> Any:
    return ctypes.c_void_p(number)


class _Bindings:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise CupyError(code)

    def _made(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0


class CupyRuntime(_Bindings):
    """A stand-in for `cupy_backends.cuda.api.runtime`, over the library."""

    CUDARuntimeError = CupyError

    def setDevice(self, index: int) -> None:
        self._made("cuDeviceGet", index)
        self._call("cuCtxSetCurrent", _signed(1))

    def free(self, address: int) -> None:
        if address:
            self._call("cuMemFree_v2", _signed(address))

    def deviceGetAttribute(self, number: int, index: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, index)
        return value.value

    def memGetInfo(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def malloc(self, size: int) -> int:
        return self._made("cuMemAlloc_v2", ctypes.c_size_t(size))

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._made("cuMemHostAlloc", ctypes.c_size_t(size), flags)

    def freeHost(self, address: int) -> None:
        self._call("cuMemFreeHost", _signed(address))

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self._call("cuMemHostRegister_v2", _signed(address), ctypes.c_size_t(size), flags)

    def hostUnregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", _signed(address))

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        name = ("HtoD", "DtoH", "DtoD")[kind - 1]
        arguments = _signed(to), _signed(source), ctypes.c_size_t(size), _signed(stream)
        self._call(f"cuMemcpy{name}Async_v2", *arguments)

    def memsetAsync(self, address: int, byte: int, size: int, stream: int) -> None:
        arguments = _signed(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size), _signed(stream)
        self._call("cuMemsetD8Async", *arguments)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._made("cuStreamCreate", flags)

    def streamSynchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", _signed(stream))

    def streamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._call("cuStreamWaitEvent", _signed(stream), _signed(event), flags)

    def eventCreateWithFlags(self, flags: int) -> int:
        return self._made("cuEventCreate", flags)

    def eventDestroy(self, event: int) -> None:
        self._call("cuEventDestroy_v2", _signed(event))

    def eventRecord(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", _signed(event), _signed(stream))

    def eventQuery(self, event: int) -> int:
        return int(self._library.cuEventQuery(_signed(event)))

    def eventSynchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", _signed(event))

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self._call("begin_capture", _signed(stream))

    def streamEndCapture(self, stream: int) -> int:
        return self._made("end_capture", _signed(stream))

    def graphInstantiate(self, graph: int) -> int:
        return self._made("cuGraphInstantiateWithFlags", _signed(graph), ctypes.c_ulonglong(0))

    def graphLaunch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", _signed(graph), _signed(stream))

    def graphDestroy(self, graph: int) -> None:
        self._call("cuGraphDestroy", _signed(graph))

    def graphExecDestroy(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", _signed(graph))


class CupyDriver(_Bindings):
    """A stand-in for `cupy_backends.cuda.api.driver`, over the library."""

    CUDADriverError = CupyError

    def moduleLoadData(self, image: bytes) -> int:
        return self._made("cuModuleLoadData", image)

    def moduleGetFunction(self, module: int, name: str) -> int:
        return self._made("cuModuleGetFunction", _signed(module), name.encode())

    def funcSetAttribute(self, function: int, which: int, value: int) -> None:
        self._call("cuFuncSetAttribute", _signed(function), which, value)

    def launchKernel(self, function: int, *numbers: int) -> None:
        *sizes, stream, parameters, extra = numbers
        assert len(sizes) == 7
        assert extra == 0
        self._call("cuLaunchKernel", _signed(function), *sizes, _signed(stream), _signed(parameters), None)


def names_used(kind: Any) -> list[str]:
    """The names of a stand-in's functions, which the real module must have."""
    return [name for name in vars(kind) if not name.startswith("_")]
