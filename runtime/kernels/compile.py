"""Compiling kernels ahead of their use: a program for an image's build, and for a process beside the one that serves.

    python -m teneral.runtime.kernels.compile [KIND ...]

Numba keeps what it has compiled in its folder (`NUMBA_CACHE_DIR`, or beside the source), for this kind of processor;
whoever needs it later loads it in milliseconds. Compiling holds a process up for seconds, so the one that serves has it
done by another. The code depends on the dtypes of arrays, not on their sizes: small ones stand in for a model's.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import llvmlite.binding
import numba
import numpy as np

from .expand import expand_int4, expand_int8
from .products import INPUT_GROUP
from .records import INPUT, LAYER_FIELDS, MAX_ROWS, NUM_IN, OUT, PROJECTION_FIELDS
from .step import HEIGHTS, head_kernel, layers_kernel
from .team import new_team
from .vectors import RUN

SOURCES = ("vectors", "sizes", "team", "records", "products", "rows", "attention", "step", "expand")
NICENESS = 10  # beside a process that serves

# Kinds as `kind_of_…` below name them: what most models need.
USUAL_KINDS = ("heads:64", "heads:128", "int8", "int4")


def kind_of_heads(head_dim: int) -> str:
    """What a decoder needs whose heads have this size, whatever its weights are."""
    return f"heads:{head_dim}"


def kind_of_weights(bits: int) -> str:
    """What it needs besides where its weights are integers."""
    return f"int{bits}"


def missing(kinds: Iterable[str]) -> list[str]:
    """Those that were not compiled here before, on such a processor, by this version."""
    return [kind for kind in sorted(set(kinds)) if not _stamp(kind).exists()]


def compile_kinds(kinds: Iterable[str]) -> None:
    """Seconds for each; ValueError for what is none."""
    for kind in kinds:
        name, _, detail = kind.partition(":")
        if name == "heads":
            for height in HEIGHTS:
                _compile_step(height, int(detail))
        elif name == "int8":
            weights, out = np.zeros((8, INPUT_GROUP), np.int8), np.zeros((8, INPUT_GROUP), np.uint16)
            for dtype in (np.uint16, np.float32):
                expand_int8(weights, np.ones((8, 1), dtype), out)
        elif name == "int4":
            zeros, out = np.zeros((8, 2), np.uint8), np.zeros((8, INPUT_GROUP), np.uint16)
            for dtype in (np.uint16, np.float32):
                expand_int4(np.zeros((8, RUN), np.uint8), np.ones((8, 2), dtype), zeros, out)
        else:
            raise ValueError(f"{kind!r} is no kind of kernel; the usual ones are {', '.join(USUAL_KINDS)}")
        _stamp(kind).touch()


def _compile_step(height: int, head_dim: int) -> None:
    """Through no layers at all, and through a head without columns."""
    team, records = new_team(), np.zeros((0, LAYER_FIELDS), np.int64)
    x, numbers = np.zeros((1, 64), np.uint16), np.zeros(1, np.int64)
    turns, where = np.zeros((1, head_dim), np.uint16), np.zeros((1, 1), np.int64)
    caches, queries = (
        np.zeros((0, 2, 1, 16, head_dim), np.uint16),
        np.zeros((MAX_ROWS, 1, head_dim), np.uint16),
    )
    layers_kernel(height, head_dim)(
        team,
        1,
        records,
        x,
        (turns, turns),
        (numbers, where),
        where,
        numbers,
        caches,
        16,
        queries,
        1e-6,
        1.0,
        0,
    )
    room, record = np.zeros((MAX_ROWS, 64), np.uint16), np.zeros(PROJECTION_FIELDS, np.int64)
    record[NUM_IN], record[INPUT], record[OUT] = 64, room.ctypes.data, room.ctypes.data
    head_kernel(height)(team, 1, record, x.ctypes.data, x, 1e-6)


def _stamp(kind: str) -> Path:
    """The file that says that this was compiled here."""
    here = Path(__file__).parent
    sources = [(here / f"{name}.py").stat() for name in SOURCES]
    what = (
        kind,
        numba.__version__,
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        [(source.st_mtime_ns, source.st_size) for source in sources],
    )
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Path(expand_int8.stats.cache_path) / f"teneral-{kind.replace(':', '-')}-{digest}"


def main() -> None:
    """Compile what the arguments name, one kind after another, until whoever started this has ended."""
    os.nice(NICENESS)
    parent = os.getppid()
    for kind in sys.argv[1:] or USUAL_KINDS:
        if os.getppid() == parent:
            compile_kinds([kind])


if __name__ == "__main__":
    main()
