"""The `Driver` protocol for one CUDA device, its launches, and CUDA's errors with what to do.

Addresses are integers, and so are the handles of streams, events, modules, functions and graphs. A
driver frees nothing by itself: what was taken is given back, or goes with the process. All methods
may be called from any thread; work on one stream runs in the order of the calls. Only `synchronize`
and `synchronize_stream` wait for the device.

Two implementations pass one contract suite: `bindings.py` over CuPy's own bindings, `libcuda.py`
over the driver's library alone. This module knows neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...errors import LoadError

SUCCESS = 0
OUT_OF_MEMORY = 2
NOT_READY = 600

# CUdevice_attribute
NUM_PROCESSORS = 16
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76

# Dynamic shared memory that a function may use without being asked for it.
UNASKED_SHARED_BYTES = 48 << 10

_RESTART = "`nvidia-smi` and the system's log (Xid) show the cause. Start the server again."
_OLD_DRIVER = (
    "Update the NVIDIA driver, or use an image for an older CUDA (`nvidia-smi` shows what it supports)."
)
_NO_DEVICE = (
    "Give the container a GPU (`docker run --gpus all`), check CUDA_VISIBLE_DEVICES, or use --device cpu."
)
_OURS = (
    "This is a bug of Teneral: please report it with this message. --device cpu serves without the device."
)
_KERNELS = "Compile the kernels for this device, or leave --kernel-dir out so that they are compiled here."
_PIN = "Raise the limit of locked memory (`ulimit -l unlimited`), or use a smaller --staging-bytes."
_SEEN = "`nvidia-smi` shows the device and its errors; --device cpu serves without it."

# By the driver's code: its name, and what to do. The runtime's codes are the same numbers.
_ERRORS: dict[int, tuple[str, str]] = {
    1: ("INVALID_VALUE", _OURS),
    OUT_OF_MEMORY: (
        "OUT_OF_MEMORY",
        "End what else uses the device (`nvidia-smi`), or serve a smaller or quantised model, shorter "
        "contexts or fewer sequences.",
    ),
    3: ("NOT_INITIALIZED", _RESTART),
    4: ("DEINITIALIZED", "The process is ending."),
    35: ("INSUFFICIENT_DRIVER", f"There is no NVIDIA driver, or an old one. {_NO_DEVICE}"),
    46: (
        "DEVICES_UNAVAILABLE",
        "Another process has the device for itself: `nvidia-smi -q -d COMPUTE` shows the mode.",
    ),
    100: ("NO_DEVICE", _NO_DEVICE),
    101: ("INVALID_DEVICE", "Name a device that is there: `nvidia-smi -L` lists them (--device cuda:N)."),
    200: ("INVALID_IMAGE", _KERNELS),
    201: ("INVALID_CONTEXT", _OURS),
    209: ("NO_BINARY_FOR_GPU", _KERNELS),
    214: ("ECC_UNCORRECTABLE", _RESTART),
    218: ("INVALID_PTX", _KERNELS),
    222: ("UNSUPPORTED_PTX_VERSION", _OLD_DRIVER),
    300: ("INVALID_SOURCE", _KERNELS),
    304: ("OPERATING_SYSTEM", _PIN),
    400: ("INVALID_HANDLE", _OURS),
    500: ("NOT_FOUND", _KERNELS),
    NOT_READY: ("NOT_READY", _OURS),
    700: ("ILLEGAL_ADDRESS", _RESTART),
    701: ("LAUNCH_OUT_OF_RESOURCES", _OURS),
    702: ("LAUNCH_TIMEOUT", "A display's watchdog ended a kernel: use a device without a display."),
    712: ("HOST_MEMORY_ALREADY_REGISTERED", _OURS),
    713: ("HOST_MEMORY_NOT_REGISTERED", _OURS),
    715: ("ILLEGAL_INSTRUCTION", _RESTART),
    716: ("MISALIGNED_ADDRESS", _RESTART),
    719: ("LAUNCH_FAILED", _RESTART),
    800: ("NOT_PERMITTED", _OURS),
    801: ("NOT_SUPPORTED", _OLD_DRIVER),
    802: ("SYSTEM_NOT_READY", "Start the machine's NVIDIA fabric manager, then the server again."),
    803: ("SYSTEM_DRIVER_MISMATCH", "The driver was updated while it was loaded: restart the machine."),
    804: ("COMPAT_NOT_SUPPORTED_ON_DEVICE", _OLD_DRIVER),
    999: ("UNKNOWN", _RESTART),
}
# After these the process's context is lost: every later call fails, too.
_LOST = {4, 214, 700, 702, 715, 716, 719, 999}


class CudaError(LoadError):
    """A call that the driver refused, or work of a stream that failed before it. `code` is the
    driver's; 0: there is no driver.
    """

    def __init__(self, code: int, doing: str, *, device: str = "", why: str = "") -> None:
        """`doing` continues "failed while": "copying to it". `why` replaces the code's name."""
        name, hint = _ERRORS.get(code, ("", _SEEN))
        what = why or (f"CUDA_ERROR_{name} ({code})" if name else f"CUDA error {code}")
        super().__init__(
            f"{device or 'the CUDA driver'} failed while {doing}: {what}",
            hint=hint if code else _NO_DEVICE,
        )
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == OUT_OF_MEMORY

    @property
    def is_lost(self) -> bool:
        """True if the process can use the device no more."""
        return self.code in _LOST


class KernelParameters:
    """A kernel's only parameter, a structure passed by value, as the driver reads it."""

    __slots__ = ("_places", "address", "structure")

    def __init__(self, structure: ctypes.Structure) -> None:
        """The structure may be changed between launches; each launch copies it."""
        self.structure = structure
        self._places = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        self.address = ctypes.addressof(self._places)


class KernelLaunch(NamedTuple):
    """One launch of a kernel."""

    function: int
    grid: tuple[int, int, int]  # blocks, each at least 1
    block: int  # threads
    shared_bytes: int  # dynamic
    parameters: KernelParameters


class Driver(Protocol):
    """One device. Every method raises `CudaError`."""

    @property
    def name(self) -> str:
        """Like "cuda:0"."""

    def attribute(self, number: int) -> int:
        """A CUdevice_attribute of the device."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""

    def alloc(self, size_bytes: int) -> int:
        """The address of new memory on the device, a multiple of 256. Content undefined."""

    def free(self, address: int) -> None: ...

    def alloc_host(self, size_bytes: int) -> int:
        """The address of new pinned memory on the host."""

    def free_host(self, address: int) -> None: ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin memory of the host, whole pages: copies then do not wait, and run at the link's rate."""

    def unpin(self, address: int) -> None: ...

    def copy_in(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy from the host. The source is read at any time until it is done."""

    def copy_out(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy to the host."""

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy within the device. The ranges must not overlap."""

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None: ...

    def stream(self) -> int:
        """A new stream, which no default stream waits for."""

    def synchronize_stream(self, stream: int) -> None:
        """Block until all work queued on the stream is done. Raises what failed in it."""

    def event(self, *, sleeps: bool = False) -> int:
        """A new event. Waiting for it spins, which is prompt, or sleeps."""

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """Have the event stand for all work queued on the stream up to now."""

    def wait(self, stream: int, event: int) -> None:
        """Have all that is queued on the stream from now on wait for the event."""

    def is_done(self, event: int) -> bool: ...

    def synchronize(self, event: int) -> None:
        """Block until the event's work is done. Raises what failed in it."""

    def module(self, image: bytes) -> int:
        """Load a binary (a cubin). Its functions stay on the device until the process ends."""

    def function(self, module: int, name: str, *, shared_bytes: int = 0) -> int:
        """A module's kernel, which may be launched with up to this much dynamic shared memory."""

    def launch(self, launch: KernelLaunch, stream: int) -> None: ...

    def graph(self, launches: Sequence[KernelLaunch]) -> int:
        """A graph that runs these launches, each after the one before, with their parameters of
        now. Nothing runs, and no stream waits.
        """

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def free_graph(self, graph: int) -> None:
        """Not while it runs."""
