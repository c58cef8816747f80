"""The choice of a device, made without importing CuPy or torch, which machines without one never
should.

Looks at files only, some microseconds. What it says is a wish: whether the device works is found
out by opening it.
"""

from __future__ import annotations

import os
import re

from ..errors import UsageError

CPU = "cpu"
# The driver's control file on Linux, and the one that stands for it in a virtual machine on
# Windows.
CONTROL_FILES = ("/dev/nvidiactl", "/dev/dxg")
_NAME = re.compile(r"auto|cpu|cuda(?::([0-9]{1,2}))?")
_NO_DRIVER = "there is no NVIDIA driver here"
_HOW = "Install it (`pip install 'teneral[cuda13]'` brings CuPy), or say --device cpu."
_HOW_DRIVER = "Give the container a GPU, or say --device cpu."


def parse_device(text: object) -> str:
    """A setting's value, checked for its form. Raises `ValueError` saying what is allowed."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return text


def choose_device(
    wanted: str, *, needs_torch: bool = True, control_files: tuple[str, ...] = CONTROL_FILES
) -> str:
    """ "cpu", or the name of a CUDA device such as "cuda:0". `wanted` is as `parse_device` has it.

    "auto" takes a CUDA device where there is one, CuPy is installed and, if it is needed, torch was built for CUDA.
    Raises `UsageError` when a CUDA device is wanted by name and what it needs is missing.
    """
    if wanted == CPU:
        return CPU
    lacks = _lacks(control_files, needs_torch)
    if wanted == "auto":
        return CPU if lacks else "cuda:0"
    if lacks:
        raise UsageError(
            f"{wanted} cannot be used: {lacks}",
            key="device",
            hint=_HOW_DRIVER if lacks is _NO_DRIVER else _HOW,
        )
    return wanted if ":" in wanted else f"{wanted}:0"


def index_of(name: str) -> int:
    """The number of a CUDA device, by a name that `choose_device` gave."""
    return int(name.partition(":")[2])


def _lacks(control_files: tuple[str, ...], needs_torch: bool) -> str:
    """The requirement of a CUDA device that is missing, in words; "" when all are met."""
    if not any(os.path.exists(path) for path in control_files):
        return _NO_DRIVER
    from importlib.util import find_spec  # 5 ms, where there is a device

    if find_spec("cupy") is None:
        return "CuPy is not installed"
    if not needs_torch:
        return ""
    torch = find_spec("torch")
    if torch is None or torch.origin is None or not _is_for_cuda(os.path.dirname(torch.origin)):
        return "torch was built without CUDA"
    return ""


def _is_for_cuda(folder: str) -> bool:
    """True if torch's own note of how it was built names a CUDA version."""
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return re.search(r"^cuda\b[^=\n]*=\s*['\"]\d", file.read(65_536), re.MULTILINE) is not None
    except OSError:
        return False
