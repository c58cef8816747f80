"""The exponential of attention and activations."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray
from tests.support.native import each_isa, loaded

Floats = NDArray[np.float32]


def exp(isa: str, x: Floats) -> Floats:
    out = np.full_like(x, -1)
    call = loaded(isa).functions.tn_exp
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    call(x.ctypes.data, out.ctypes.data, x.size)
    return out


@each_isa
def test_it_is_within_one_unit_in_the_last_place(isa: str) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-87.3, 88.7, 1_000_000), rng.uniform(-1, 1, 500_003), rng.normal(0, 1e-6, 1000)]
    ).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    units = np.abs(exp(isa, x) - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() <= 1.0


@each_isa
def test_its_ends_are_zero_infinity_and_no_number(isa: str) -> None:
    x = np.array([-np.inf, -1e30, -104.5, -0.0, 0.0, 88.8, 1e30, np.inf, np.nan], np.float32)
    assert np.array_equal(exp(isa, x)[:-1], np.array([0, 0, 0, 1, 1, np.inf, np.inf, np.inf], np.float32))
    assert np.isnan(exp(isa, x)[-1])


@each_isa
def test_denormal_results_are_kept(isa: str) -> None:
    x = np.linspace(-103, -88, 1000, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(exp(isa, x) - expected) <= 2 * 2.0**-149).all()
