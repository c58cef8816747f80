"""Binaries of kernels in a folder, as `compile.py` has left them: found, and checked, by what they were made of.

Keyed by the device's architecture and by the variant; of other sources than those that are installed nothing is taken.
Nothing is known here of a driver.
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
_TYPES = {"*bf16", "*fp16", "*fp32", "*fp64", "*i64", "i32", "fp32"}


@dataclass(frozen=True, slots=True)
class Binary:
    """How one is launched."""

    key: str
    name: str  # of its entry
    types: tuple[str, ...]  # of its arguments
    num_parameters: int  # of the entry: those, and addresses that may be 0
    num_warps: int
    shared_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.key}.cubin"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Library:
    """All binaries for one device."""

    def __init__(self, folder: Path, binaries: dict[str, Binary]) -> None:
        self.folder = folder
        self.binaries = binaries

    def find(self, variant: Variant) -> tuple[Binary, bytes] | None:
        """How it is launched, and its content. OSError when that cannot be read."""
        binary = self.binaries.get(variant.key)
        if binary is None:
            return None
        path = self.folder / binary.file_name
        if path.stat().st_size > MAX_BINARY_BYTES:
            raise OSError(f"{path} is larger than any kernel")
        return binary, path.read_bytes()


def open_library(root: Path, capability: tuple[int, int]) -> tuple[Library | None, str]:
    """The binaries in this folder that such a device runs, and in words what was found; None: there are none.

    A device runs what was compiled for it, and up to 8.x also what was for a lower one of the same first number; from
    9.0 on kernels use what only that one architecture has.
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
        return None, f"{folder} cannot be used: {error}"
    return Library(folder, binaries), f"{len(binaries)} in {folder}"


def architecture_folder(root: Path, architecture: int) -> Path:
    return root / f"sm_{architecture}"


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _read_index(path: Path) -> dict[str, Binary]:
    """ValueError for one that is damaged, or was made of other sources."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{path.name} is too large")
    index = json.loads(path.read_bytes())
    if index["sources"] != sources_digest():
        raise ValueError("its kernels were compiled of another version's sources")
    found: dict[str, Binary] = {}
    for each in index["binaries"]:
        binary = Binary(**{**each, "types": tuple(each["types"])})
        if not _KEY.fullmatch(binary.key) or not _TYPES.issuperset(binary.types):
            raise ValueError(f"{binary.key!r} is no kernel")
        if not len(binary.types) <= binary.num_parameters <= len(binary.types) + 2:
            raise ValueError(f"{binary.key} has {binary.num_parameters} parameters")
        if not (1 <= binary.num_warps <= 32 and 0 <= binary.shared_bytes <= 228 << 10):
            raise ValueError(f"{binary.key} cannot be launched")
        found[binary.key] = binary
    return found
