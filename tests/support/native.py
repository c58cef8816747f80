"""The native core's libraries that this machine can run, and numpy's answers to compare theirs with."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import build_native
import numpy as np
import pytest
from numpy.typing import NDArray

from teneral.loader.native import fill, frames, split
from teneral.loader.native.library import Library, library_path, usable_isas
from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Products, Weight

Array = NDArray[Any]

ROOT = Path(__file__).parents[2]
TILES = "x86_64_amx"
SOFT_TILES = build_native.SOFT_TILES[0]

_MISSING = pytest.mark.skip(reason="the native libraries are not built here: python build_native.py")


def _has_tiles() -> bool:
    """True if this machine's processor has tiles, and its system permits them."""
    return TILES in usable_isas() and Library(library_path(TILES)).start()


@functools.cache
def _soft_tiles() -> Path | None:
    """The library whose tiles are in software, compiled once for these sources; None where that cannot be done."""
    compiler = build_native.find_compiler()
    if compiler is None or "x86_64_v4_bf16" not in usable_isas():
        return None
    sources = b"".join(path.read_bytes() for path in sorted((ROOT / "native").iterdir()))
    key = hashlib.sha256(sources + build_native.FLAGS.encode()).hexdigest()[:16]
    folder = ROOT / "build" / f"soft-tiles-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"teneral_{SOFT_TILES}.so"
    with (folder / "lock").open("w") as lock:  # of the tests' processes one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (
            path
            if path.exists()
            else build_native.compile_library(compiler, *build_native.SOFT_TILES, folder)
        )


# Where there are no tiles, software does their work: all tests of tiles run everywhere. A test's id says which ran.
_TILES_THERE = [TILES] if _has_tiles() else []
_WITHOUT_TILES = [isa for isa in usable_isas() if isa != TILES]
ISAS = (
    _TILES_THERE + _WITHOUT_TILES + ([SOFT_TILES] if not _TILES_THERE and _soft_tiles() else [])
    if usable_isas()
    else [pytest.param("", marks=_MISSING)]
)
each_isa = pytest.mark.parametrize("isa", ISAS)


def multiplies_bf16(isa: str) -> bool:
    """True if products of bf16 inputs take bf16 weights: integers of 4 bits are scaled, and rounded to bf16, before."""
    return "bf16" in isa or "amx" in isa


@functools.cache
def loaded(isa: str) -> Library:
    library = Library(path_of(isa))
    assert library.start(), f"{isa} is not permitted here"
    return library


def path_of(isa: str) -> str:
    """The library's file."""
    return str(_soft_tiles()) if isa == SOFT_TILES else library_path(isa)


@functools.cache
def products(isa: str) -> Products:
    return Products(loaded(isa))


@contextmanager
def threads(isa: str, number: int) -> Iterator[None]:
    """Compute with that number of threads inside."""
    functions = loaded(isa).functions
    functions.tn_set_threads(number)
    try:
        yield
    finally:
        functions.tn_set_threads(1)


@contextmanager
def fused_pairs(isa: str) -> Iterator[None]:
    """Multiply pairs of bf16 by two fused products inside."""
    functions = loaded(isa).functions
    functions.tn_set_fused_pairs(1)
    try:
        yield
    finally:
        functions.tn_set_fused_pairs(0)


@contextmanager
def decoded_by(isa: str) -> Iterator[None]:
    """Make and decode all frames, planes and parts inside by the library of one instruction set."""
    functions = loaded(isa).functions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "_function", lambda: functions.tn_fill_part)
        patch.setattr(frames, "_function", lambda: functions.tn_decode_frames)
        functions.tn_encoded_bound.restype = ctypes.c_int64
        functions.tn_encoded_bound.argtypes = ctypes.c_int64, ctypes.c_int64
        patch.setattr(
            frames, "_encode_functions", lambda: (functions.tn_encoded_bound, functions.tn_encode_frames)
        )
        patch.setattr(split, "_function", lambda: functions.tn_split)
        yield


def pack_nibbles(levels: Array) -> Array:
    """(N, K) below 16 → (N, K / 2), as `docs/quantize.md` lays them out."""
    halves = levels.reshape(len(levels), -1, 2, 32).astype(np.uint8)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(levels), -1)


def product(isa: str, x: Array, weight: Weight, out_dtype: type[Any] = np.float32) -> Array:
    """x @ w.T + bias in fresh memory that was poisoned before."""
    out = np.full((len(x), weight.num_out), -1, np.int32 if out_dtype is np.float32 else np.int16)
    return products(isa).linear(x, weight, out.view(out_dtype))


def widened(x: Array) -> Array:
    """What an array of fp32 or bf16 means, in fp64."""
    return (arrays.from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)
