"""Kernel launches from binaries, through the CUDA driver API (docs/decisions/0019).

Binaries compiled ahead of time are loaded from a folder; missing ones are compiled by Triton when
the engine is made. Either way a launch needs neither Triton nor a C compiler, goes to torch's
current stream, and can be recorded. A launch checks only the alignment of its arguments: shapes are
the caller's responsibility (`decoder.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from .library import Binary
from .variants import Variant, is_aligned

Grid = tuple[int, ...]
Argument = torch.Tensor | int | float

_MAX_SHARED_BYTES_UNASKED = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALIGNMENT_MASK = 15
_C_TYPES: dict[str, Callable[..., Any]] = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class LaunchError(RuntimeError):
    """The driver refused a binary or a launch. `result` is the driver's error code; 0: it was not
    called.
    """

    def __init__(self, message: str, *, result: int = 0) -> None:
        super().__init__(message)
        self.result = result


class Launcher(Protocol):
    """Enqueue one kernel on the current stream. `arguments` are those of the variant's signature,
    in order.
    """

    def __call__(self, variant: Variant, grid: Grid, *arguments: Argument) -> None: ...

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Load or compile all of these variants now. Raises the first error."""


class BinarySource(Protocol):
    """A provider of binaries."""

    def find(self, variant: Variant) -> tuple[Binary, bytes] | None:
        """Return a binary's launch parameters and content; None: not available.

        May take seconds. Raises errors of reading or compiling.
        """


class Driver:
    """The functions of the CUDA driver that a launch needs, as its header declares them."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError without a driver."""
        self._device = device
        self._cuda = ctypes.CDLL("libcuda.so.1")
        launch = self._cuda.cuLaunchKernel
        # function; grid; block; shared bytes; stream; parameters; extra
        launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self.launch = launch

    def load(self, content: bytes, binary: Binary) -> ctypes.c_void_p:
        """Load a binary's function, which stays on the device until the process ends. Waits for no
        stream.
        """
        self._make_current()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        cuda = self._cuda
        self.check(cuda.cuModuleLoadData(ctypes.byref(module), content), f"loading {binary.key}")
        found = cuda.cuModuleGetFunction(ctypes.byref(function), module, binary.name.encode())
        self.check(found, f"finding {binary.name} in {binary.key}")
        if binary.shared_bytes > _MAX_SHARED_BYTES_UNASKED:
            allowed = cuda.cuFuncSetAttribute(
                function, _MAX_DYNAMIC_SHARED, ctypes.c_int(binary.shared_bytes)
            )
            self.check(allowed, f"{binary.shared_bytes} bytes of shared memory for {binary.key}")
        return function

    def _make_current(self) -> None:
        """Make torch's primary context current in this thread, without waiting for its streams,
        such as a load's.

        A thread has no driver context until the runtime is first called in it.
        """
        cuda, context, number = self._cuda, ctypes.c_void_p(), ctypes.c_int()
        what = f"making {self._device} current"
        self.check(cuda.cuInit(0), what)
        self.check(cuda.cuCtxGetCurrent(ctypes.byref(context)), what)
        if not context.value:
            self.check(cuda.cuDeviceGet(ctypes.byref(number), self._device.index or 0), what)
            self.check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), what)
            self.check(cuda.cuCtxSetCurrent(context), what)

    def check(self, result: int, what: str) -> None:
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            message = text.value.decode() if text.value else "error"
            raise LaunchError(f"{what}: {message} ({result})", result=result)


class BinaryLauncher:
    """A `Launcher` of the first source that has each binary.

    Not thread-safe; the device's context must be current in the calling thread.
    """

    def __init__(self, sources: Sequence[BinarySource], driver: Driver, device: torch.device) -> None:
        self._sources = sources
        self._driver = driver
        self._device = device
        self._loaded: dict[str, _Loaded] = {}

    def __call__(self, variant: Variant, grid: Grid, *arguments: Argument) -> None:
        loaded = self._loaded.get(variant.key)
        if loaded is None:
            loaded = self._load(variant)
        loaded.launch(grid, torch.cuda.current_stream(self._device).cuda_stream, arguments)

    def prepare(self, variants: Iterable[Variant]) -> None:
        for variant in variants:
            if variant.key not in self._loaded:
                self._load(variant)

    def _load(self, variant: Variant) -> _Loaded:
        for source in self._sources:
            found = source.find(variant)
            if found is not None:
                function = self._driver.load(found[1], found[0])
                self._loaded[variant.key] = loaded = _Loaded(self._driver, function, found[0], variant)
                return loaded
        raise LaunchError(f"{variant.key} was not compiled ahead of time, and Triton is not available")


class _Loaded:
    """A binary's function, and the buffer of its parameters."""

    def __init__(self, driver: Driver, function: ctypes.c_void_p, binary: Binary, variant: Variant) -> None:
        self._driver = driver
        self._function = function
        self._binary = binary
        self._num_threads = 32 * binary.num_warps
        self._values, self._addresses = parameters_for(binary)
        names = [name for name, _ in variant.signature]
        self._setters = [
            (value, kind.startswith("*"), is_aligned(name, kind))
            for value, kind, name in zip(self._values, binary.types, names, strict=False)
        ]

    def launch(self, grid: Grid, stream: int, arguments: tuple[Argument, ...]) -> None:
        for (value, is_pointer, must_be_aligned), argument in zip(self._setters, arguments, strict=True):
            if is_pointer:
                address = argument.data_ptr()  # type: ignore[union-attr]
                if must_be_aligned and address & _ALIGNMENT_MASK:
                    raise LaunchError(
                        f"{self._binary.key}: the address {address:#x} of a tensor is not a multiple of 16"
                    )
                value.value = address
            else:
                value.value = argument
        x, y, z = (*grid, 1, 1)[:3]
        result = self._driver.launch(
            self._function,
            x,
            y,
            z,
            self._num_threads,
            1,
            1,
            self._binary.shared_bytes,
            stream,
            self._addresses,
            None,
        )
        if result:
            self._driver.check(result, f"launching {self._binary.key}")


def parameters_for(binary: Binary) -> tuple[list[Any], Any]:
    """The buffer of each parameter, and the array of their addresses for a launch.

    Parameters without an argument are 0.
    """
    values: list[Any] = [_C_TYPES.get(kind, ctypes.c_uint64)(0) for kind in binary.types]
    values += [ctypes.c_uint64(0) for _ in range(binary.num_parameters - len(values))]
    addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    return values, addresses
