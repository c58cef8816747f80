"""The native core's shared library: found, loaded and checked for this processor.

`docs/native.md` has the list of instruction sets. The first call of `library` loads the best one
that the processor has; `TENERAL_ISA` names a lower one.
The import loads nothing. The signatures of functions are declared by their callers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

from ..errors import NativeLibraryError, UsageError
from ..process.cpu import available_cores

VERSION = 4  # of the interface, `TN_VERSION` in core.h
ISA_VARIABLE = "TENERAL_ISA"
_CPUINFO = "/proc/cpuinfo"
_MAX_CPUINFO_BYTES = 64 << 10  # enough for the first processor's lines
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")

_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
# The best first, with what they need of /proc/cpuinfo.
_ISAS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86_64_amx": _V4_BF16 | {"avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
        "x86_64_v4_bf16": _V4_BF16,
        "x86_64_v4": _V4,
        "x86_64_v3": _V3,
    },
    "aarch64": {"aarch64_bf16": frozenset({"asimd", "bf16", "i8mm"}), "aarch64": frozenset({"asimd"})},
}


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type for a structure's `_fields_`; spaces separate their names."""
    return tuple((name, kind) for name in names.split())


class Library:
    """A loaded library. `functions` are the C functions by name; `isa` is the instruction set it
    was built for.
    """

    __slots__ = ("functions", "isa", "sizes")

    def __init__(self, path: str) -> None:
        """Raises `NativeLibraryError` if it does not load, or has another version."""
        try:
            self.functions = ctypes.CDLL(path)
        except OSError as error:
            raise NativeLibraryError(
                f"{os.path.basename(path)} does not load: {error}",
                hint=f"name another instruction set in {ISA_VARIABLE}",
            ) from error
        describe = self.functions.tn_describe
        describe.restype = ctypes.c_char_p
        facts = dict(line.split(" ", 1) for line in describe().decode("ascii").splitlines())
        self.isa = facts.pop("isa")
        version = int(facts.pop("version"))
        if version != VERSION:
            raise NativeLibraryError(
                f"{os.path.basename(path)} has version {version} of the interface, and {VERSION} is needed",
                hint="build it again: python build_native.py",
            )
        self.sizes = {name: int(size) for name, size in facts.items()}

    def start(self) -> bool:
        """Ask the system for what the instruction set needs: for tiles their permission, once a process.

        False where it is refused: by Linux before 5.16, by gVisor, or since a thread has an alternate
        signal stack that is too small for tiles.
        """
        return int(self.functions.tn_start()) == 0

    def check_struct(self, name: str, declared: type[ctypes.Structure]) -> None:
        """Raises `NativeLibraryError` where the library's struct has another size than it was
        declared with here.
        """
        self.check_size(name, ctypes.sizeof(declared))

    def check_size(self, name: str, declared_bytes: int) -> None:
        """The same, of a struct that is packed here."""
        if self.sizes.get(name) != declared_bytes:
            raise NativeLibraryError(
                f"the native library's {name} has {self.sizes.get(name)} bytes, and {declared_bytes} are declared",
                hint="build it again: python build_native.py",
            )


def library() -> Library | None:
    """The library for this processor, opened by the first call; None where there is none. Raises as `open_library`."""
    with _opening:
        return _opened()


def open_library() -> Library | None:
    """The library for this processor, with as many threads as the container has cores; None where
    there is none.

    Raises `UsageError` where `TENERAL_ISA` names one that cannot be used, and `NativeLibraryError`
    as `Library` does.
    """
    named, usable = os.environ.get(ISA_VARIABLE), usable_isas()
    while (isa := choose_isa(named, usable)) is not None:
        loaded = Library(library_path(isa))
        if loaded.start():
            loaded.functions.tn_set_threads(available_cores())
            loaded.functions.tn_set_fused_pairs(prefers_fused_pairs(read_cpuinfo()))
            return loaded
        usable.remove(isa)
    return None


# Decoding threads and a backend may both be first. The later of two would set the threads again that the backend has
# set since.
_opening = threading.Lock()
_opened = functools.cache(open_library)


def require_library() -> Library:
    """The library for this processor. Raises `NativeLibraryError` where there is none, and as `library` does."""
    loaded = library()
    if loaded is None:
        raise NativeLibraryError(
            f"there is no native library for this processor ({os.uname().machine})",
            hint="install a wheel of Teneral for this platform, or build it in the checkout: python build_native.py",
        )
    return loaded


def library_path(isa: str) -> str:
    return os.path.join(_FOLDER, f"teneral_{isa}.so")


def usable_isas() -> list[str]:
    """Instruction sets that this processor has and that there are libraries for, the best first."""
    supported = supported_isas(os.uname().machine, cpu_features(read_cpuinfo()))
    return [isa for isa in supported if os.path.exists(library_path(isa))]


def supported_isas(machine: str, features: frozenset[str]) -> list[str]:
    """Instruction sets of a processor with these features of /proc/cpuinfo, the best first."""
    return [isa for isa, needed in _ISAS.get(machine, {}).items() if needed <= features]


def choose_isa(named: str | None, usable: list[str]) -> str | None:
    """The best instruction set, or the named one. Raises `UsageError` where that is not usable."""
    if not named:
        return usable[0] if usable else None
    if named not in usable:
        raise UsageError(
            f"{ISA_VARIABLE}={named}: there is no library for that instruction set, or the processor lacks it",
            key=ISA_VARIABLE,
            hint=f"this machine can use {', '.join(usable) or 'none'}",
        )
    return named


def read_cpuinfo() -> str:
    """The text of the first processor in /proc/cpuinfo; empty where that cannot be read."""
    try:
        with open(_CPUINFO, "rb") as file:
            return file.read(_MAX_CPUINFO_BYTES).decode("ascii", "replace")
    except OSError:
        return ""


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """The features in a text of /proc/cpuinfo: `flags` of x86-64, `Features` of aarch64."""
    return frozenset(_first_value(cpuinfo, "flags", "Features").split())


def prefers_fused_pairs(cpuinfo: str) -> bool:
    """True for a text of /proc/cpuinfo of an Intel processor, on which two fused products are faster
    than the instruction for pairs of bf16.
    """
    return _first_value(cpuinfo, "vendor_id") == "GenuineIntel"


def _first_value(cpuinfo: str, *names: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
