"""Arguments that C could not survive are refused in Python, before any address is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.native import each_isa, products

from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Weight

Array = NDArray[Any]


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def misaligned(rows: int, columns: int) -> Array:
    memory = np.zeros(rows * columns * 4 + 1, np.uint8)
    return memory[1:].view(np.float32).reshape(rows, columns)


@pytest.mark.parametrize(
    ("data", "others", "match"),
    [
        (ones(4), {}, "num_out, num_in"),
        (ones(0, 4), {}, "num_out, num_in"),
        (ones(4, 8, dtype=np.float64), {}, "float64"),
        (ones(4, 8, dtype=np.int16), {}, "int16"),
        (ones(8, 4).T, {}, "contiguous"),
        (misaligned(4, 8), {}, "aligned"),
        (ones(4, 8), {"scale": ones(4, 1)}, "no scales"),
        (ones(4, 8), {"zero": ones(4, 1, dtype=np.uint8)}, "no scales"),
        (ones(4, 8), {"bias": ones(5)}, "bias"),
        (ones(4, 8), {"bias": ones(4, dtype=np.int8)}, "bias"),
        (ones(4, 64, dtype=np.int8), {}, "need scales"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(4)}, "need scales"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(3, 1)}, "need scales"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(4, 0)}, "need scales"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(4, 1, dtype=np.int8)}, "fp32, bf16 or fp16"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(4, 3)}, "multiple of 32"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(4, 4)}, "multiple of 32"),
        (ones(4, 64, dtype=np.int8), {"scale": ones(8, 2)[::2]}, "contiguous"),
        (ones(4, 48, dtype=np.uint8), {"scale": ones(4, 1)}, "multiple of 64"),
        (
            ones(4, 64, dtype=np.uint8),
            {"scale": ones(4, 2), "zero": ones(4, 2, dtype=np.int16)},
            "zeros must be",
        ),
        (
            ones(4, 64, dtype=np.uint8),
            {"scale": ones(4, 2), "zero": ones(4, 4, dtype=np.uint8)},
            "zeros must be",
        ),
        (
            ones(4, 64, dtype=np.int8),
            {"scale": ones(4, 2), "zero": ones(4, 2, dtype=np.uint8)},
            "zeros must be",
        ),
        (
            ones(4, 64, dtype=np.int8),
            {"scale": ones(4, 2), "zero": np.full((4, 2), 129, np.int16)},
            "from -129 to 128",
        ),
    ],
)
def test_weights_that_the_core_could_not_read_are_refused(
    data: Array, others: dict[str, Array], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Weight(data, **others)


def read_only() -> Array:
    out = ones(2, 4)
    out.flags.writeable = False
    return out


SHARED = ones(2, 12)


@each_isa
@pytest.mark.parametrize(
    ("x", "out", "match"),
    [
        (ones(2, 7), ones(2, 4), "x must be"),
        (ones(8), ones(2, 4), "x must be"),
        (ones(2, 8), ones(2, 5), "out must be"),
        (ones(2, 8), ones(3, 4), "rows"),
        (ones(2, 8, dtype=np.float16), ones(2, 4), "x must be"),
        (ones(2, 8, dtype=np.float64), ones(2, 4), "float64"),
        (ones(2, 8), ones(2, 4, dtype=np.int8), "out must be"),
        (misaligned(2, 8), ones(2, 4), "aligned"),
        (ones(8, 2).T, ones(2, 4), "rows must be contiguous"),
        (ones(2, 16)[:, ::2], ones(2, 4), "rows must be contiguous"),
        (ones(2, 8)[::-1], ones(2, 4), "rows must be contiguous"),
        (np.broadcast_to(ones(1, 8), (2, 8)), ones(2, 4), "rows must be contiguous"),
        (ones(2, 8), read_only(), "writable"),
        (SHARED[:, :8], SHARED[:, 4:8], "apart from x"),
    ],
)
def test_rows_that_the_core_could_not_read_are_refused(isa: str, x: Array, out: Array, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        products(isa).linear(x, Weight(ones(4, 8)), out)


def test_an_address_is_that_of_the_first_element_of_any_array():
    frozen = np.arange(8)
    frozen.flags.writeable = False
    for array in (ones(4), ones(2, 4)[:, 1:], ones(4)[::-1], ones(0, 4), frozen, misaligned(2, 2)):
        assert arrays.address(array) == array.__array_interface__["data"][0]
