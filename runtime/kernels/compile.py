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

from .attention import attention
from .expand import expand_int4, expand_int8
from .products import HEIGHTS, INPUT_GROUP, bf16_product, int4_product, int8_product
from .rows import SILU, add_, gate, place_heads, quantise, rms_norm
from .vectors import RUN

NICENESS = 10  # beside a process that serves

# Kinds as `kind_of_…` below name them: what most models need.
USUAL_KINDS = ("heads:64", "heads:128", "bf16", "int8:uint16", "int4:1:False:uint16", "int4:2:False:uint16")


def kind_of_heads(head_dim: int) -> str:
    """What a decoder needs whose heads have this size, whatever its weights are."""
    return f"heads:{head_dim}"


def kind_of_int8(scales: np.dtype) -> str:
    return f"int8:{scales}"


def kind_of_int4(runs_a_group: int, *, has_zeros: bool, scales: np.dtype) -> str:
    return f"int4:{runs_a_group}:{has_zeros}:{scales}"


def missing(kinds: Iterable[str]) -> list[str]:
    """Those that were not compiled here before, on such a processor, by this version."""
    return [kind for kind in sorted(set(kinds)) if not _stamp(kind).exists()]


def compile_kinds(kinds: Iterable[str]) -> None:
    """Seconds for each; ValueError for what is none."""
    for kind in kinds:
        name, *details = kind.split(":")
        if name == "heads":
            _compile_rows(int(details[0]))
        elif name == "bf16":
            for height in HEIGHTS:
                rows = np.zeros((height, INPUT_GROUP), np.uint16)
                weights = np.zeros((8, INPUT_GROUP), np.uint16)
                bf16_product(height)(weights, rows, np.zeros((height, 8), np.float32), 0)
        elif name == "int8":
            weights, factors = np.zeros((8, INPUT_GROUP), np.int8), np.ones((8, 1), details[0])
            expand_int8(weights, factors, np.zeros((8, INPUT_GROUP), np.uint16))
            for height in HEIGHTS:
                int8_product(height)(weights, factors, *_inputs(height, INPUT_GROUP), 0)
        elif name == "int4":
            runs_a_group, has_zeros = int(details[0]), details[1] == "True"
            shape = (8, max(1, 2 // runs_a_group))
            factors, zeros = np.ones(shape, details[2]), np.zeros(shape, np.uint8)
            expand_int4(np.zeros((8, RUN), np.uint8), factors, zeros, np.zeros((8, INPUT_GROUP), np.uint16))
            for height in HEIGHTS:
                multiply = int4_product(height, runs_a_group, has_zeros=has_zeros)
                multiply(np.zeros((8, RUN), np.uint8), factors, zeros, *_inputs(height, RUN), 0)
        else:
            raise ValueError(f"{kind!r} is no kind of kernel; the usual ones are {', '.join(USUAL_KINDS)}")
        _stamp(kind).touch()


def _inputs(height: int, run: int) -> tuple[np.ndarray, ...]:
    """Numbers, scales and totals of quantised inputs, and room for their product."""
    numbers, scales = np.zeros((height, INPUT_GROUP), np.int8), np.zeros((height, 1), np.float32)
    totals = np.zeros((height, INPUT_GROUP // run), np.int32)
    quantise(np.zeros((height, INPUT_GROUP), np.uint16), numbers, scales, totals)
    return numbers, scales, totals, np.zeros((height, 8), np.float32)


def _compile_rows(head_dim: int) -> None:
    """What is between the products."""
    rows, bias, none = np.zeros((8, 64), np.uint16), np.zeros(64, np.uint16), np.empty(0, np.uint16)
    norms, turns = np.zeros((2, head_dim), np.uint16), np.zeros((8, head_dim), np.uint16)
    heads, cache = np.zeros((8, 2, head_dim), np.uint16), np.zeros((2, 1, 16, head_dim), np.uint16)
    numbers, tables = np.zeros(8, np.int64), np.zeros((8, 1), np.int64)
    rms_norm(rows, bias, 1e-6, rows)
    add_(rows, np.zeros((8, 64), np.float32), bias)
    gate(np.zeros((8, 128), np.float32), none, SILU, rows)
    product = np.zeros((8, 4 * head_dim), np.float32)
    place_heads(product, none, norms, 1e-6, turns, turns, numbers, cache, heads)
    attention(head_dim)(heads, cache, tables, numbers, numbers + 1, 16, 1.0, heads)


def _stamp(kind: str) -> Path:
    """The file that says that this was compiled here."""
    sources = [
        Path(__file__).with_name(f"{name}.py").stat()
        for name in ("vectors", "products", "rows", "attention", "expand")
    ]
    what = (
        kind,
        numba.__version__,
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        [(source.st_mtime_ns, source.st_size) for source in sources],
    )
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Path(rms_norm.stats.cache_path) / f"teneral-{kind.replace(':', '-')}-{digest}"


def main() -> None:
    """Compile what the arguments name, one kind after another, until whoever started this has ended."""
    os.nice(NICENESS)
    parent = os.getppid()
    for kind in sys.argv[1:] or USUAL_KINDS:
        if os.getppid() == parent:
            compile_kinds([kind])


if __name__ == "__main__":
    main()
