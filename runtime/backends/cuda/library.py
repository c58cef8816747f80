"""The folder of compiled kernels that `compile.py` writes.

Binaries are looked up by the device's architecture and by the variant; those of other sources than
the installed ones are rejected. This module knows nothing of the driver.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .variants import Variant, sources_digest

INDEX = "index.json"
MAX_INDEX_BYTES = 4 << 20
MAX_BINARY_BYTES = 16 << 20
_FOLDER = re.compile(r"sm_(\d{2,3})")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,200}")
_TYPES = {"*bf16", "*fp16", "*fp32", "*fp64", "*i64", "*i8", "*u8", "i32", "fp32"}


@dataclass(frozen=True, slots=True)
class Binary:
    """The launch parameters of one binary."""

    key: str
    name: str  # of its entry
    types: tuple[str, ...]  # of its arguments
    num_parameters: int  # of the entry: its arguments, then addresses that may be 0
    num_warps: int
    shared_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.key}.cubin"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class CudaLibrary:
    """The binaries for one device."""

    def __init__(self, folder: Path, binaries: dict[str, Binary]) -> None:
        self.folder = folder
        self.binaries = binaries

    def find(self, variant: Variant) -> tuple[Binary, bytes] | None:
        """The binary's launch parameters and content. Raises OSError if it cannot be read."""
        binary = self.binaries.get(variant.key)
        if binary is None:
            return None
        path = self.folder / binary.file_name
        if path.stat().st_size > MAX_BINARY_BYTES:
            raise OSError(f"{path} is too large for a kernel")
        return binary, path.read_bytes()


def open_library(root: Path, capability: tuple[int, int]) -> tuple[CudaLibrary | None, str]:
    """Open the binaries in `root` for a device of this capability. Returns them and a description
    for logs; None: there are none.

    A device runs binaries for its own architecture, and up to 8.x also those for a lower one of the
    same major version; from 9.0 on kernels use features of that one architecture.
    """
    own = capability[0] * 10 + capability[1]
    found = [int(match[1]) for path in _folders(root) if (match := _FOLDER.fullmatch(path.name))]
    fitting = [number for number in found if number == own or (own < 90 and own // 10 * 10 <= number < own)]
    if not fitting:
        return None, f"{root} has no kernels for sm_{own}"
    folder = architecture_folder(root, max(fitting))
    try:
        binaries = _read_index(folder / INDEX)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{folder} is unusable: {error}"
    return CudaLibrary(folder, binaries), f"{len(binaries)} in {folder}"


def architecture_folder(root: Path, architecture: int) -> Path:
    return root / f"sm_{architecture}"


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _read_index(path: Path) -> dict[str, Binary]:
    """Read the index. Raises ValueError if it is damaged or of other sources."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{path.name} is too large")
    index = json.loads(path.read_bytes())
    if index["sources"] != sources_digest():
        raise ValueError("its kernels were compiled from another version's sources")
    found: dict[str, Binary] = {}
    for each in index["binaries"]:
        binary = Binary(**{**each, "types": tuple(each["types"])})
        if not _KEY.fullmatch(binary.key) or not _TYPES.issuperset(binary.types):
            raise ValueError(f"{binary.key!r} is not a kernel")
        if not len(binary.types) <= binary.num_parameters <= len(binary.types) + 2:
            raise ValueError(f"{binary.key} has {binary.num_parameters} parameters, which is invalid")
        if not (1 <= binary.num_warps <= 32 and 0 <= binary.shared_bytes <= 228 << 10):
            raise ValueError(f"{binary.key} has invalid launch parameters")
        found[binary.key] = binary
    return found
