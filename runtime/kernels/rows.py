"""What a decoder does to a few rows between its matrix products, compiled.

The same operations as in `runtime/models`, with the same roundings to bf16 at the same places, so that a token does not
depend on which of both has computed it more than it depends on how many others are computed beside it. Numbers in
bf16 are given by their bits, uint16; what comes out of a product is float32 and has not been rounded. A bias that is
not there has no elements.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from .vectors import from_bits, narrowed, widened

_COMPILED = {
    "nogil": True,
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}

F0, F1, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
# e^(r ln 2) for r within half of 0: Taylor's series up to the sixth power, which is off by 1e-7.
EXP_TERMS = tuple(np.float32(0.6931471805599453**n / math.factorial(n)) for n in range(7))
SQRT_HALF = np.float32(0.7071067811865476)
GELU_SCALE, GELU_CUBE = np.float32(0.7978845608028654), np.float32(0.044715)

SILU, GELU, GELU_TANH, RELU = range(4)
ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_python": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
}


@numba.njit(**_COMPILED)
def rounded(number: Any) -> Any:
    """The nearest bf16, as float32."""
    return widened(narrowed(number))


@numba.njit(**_COMPILED)
def exp(number: Any) -> Any:
    """e to the power of a float32; unlike the library's, a loop over it is compiled to vectors."""
    power = min(max(number, np.float32(-87.0)), np.float32(88.0)) * LOG2_E
    whole = np.floor(power + HALF)
    rest = power - whole
    value = EXP_TERMS[6]
    for n in range(5, -1, -1):
        value = value * rest + EXP_TERMS[n]
    return value * from_bits(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@numba.njit(**_COMPILED)
def _with_bias(number: Any, bias: Any, place: int) -> Any:
    """A product's element as bf16, in float32."""
    return rounded(number + widened(bias[place])) if bias.size else rounded(number)


@numba.njit(**_COMPILED)
def rms_norm(x: Any, weight: Any, eps: float, out: Any, begin: int, end: int) -> None:
    """Rows [begin, end) of x (T, size) uint16 → out (T or more, size) uint16; weight (size,) uint16 or float32."""
    size = x.shape[1]
    for row in range(begin, end):
        squares = F0
        for i in range(size):
            value = widened(x[row, i])
            squares += value * value
        factor = F1 / np.float32(math.sqrt(squares * np.float32(1.0 / size) + np.float32(eps)))
        for i in range(size):
            unit = rounded(widened(x[row, i]) * factor)
            out[row, i] = narrowed(unit * rounded(widened(weight[i])))


@numba.njit(**_COMPILED)
def add_(x: Any, product: Any, bias: Any, begin: int, end: int) -> None:
    """Columns [begin, end) of x (T, size) uint16, in place: plus a product (T or more, size) float32, plus its bias."""
    for row in range(x.shape[0]):
        for i in range(begin, end):
            x[row, i] = narrowed(widened(x[row, i]) + _with_bias(product[row, i], bias, i))


@numba.njit(**_COMPILED)
def quantise(x: Any, numbers: Any, scales: Any, totals: Any, begin: int, end: int) -> None:
    """Groups [begin, end) of x (T, K) uint16 → numbers (T, K) int8 that are to be multiplied with scales (T, groups)
    float32; and what each run of them adds up to, totals (T, runs) int32. A group has one or more runs.
    """
    group_size, run_size = x.shape[1] // scales.shape[1], x.shape[1] // totals.shape[1]
    runs_a_group = group_size // run_size
    for row in range(x.shape[0]):
        for group in range(begin, end):
            # Slices: of an index into one the compiler knows that it is not negative.
            some = x[row, group * group_size : (group + 1) * group_size]
            quantised = numbers[row, group * group_size : (group + 1) * group_size]
            largest = F0
            for i in range(group_size):
                largest = max(largest, abs(widened(some[i])))
            scales[row, group] = largest / np.float32(127.0)
            factor = np.float32(127.0) / largest if largest > F0 else F0
            for i in range(group_size):
                quantised[i] = np.int8(np.int32(np.rint(widened(some[i]) * factor)))
        for run in range(begin * runs_a_group, end * runs_a_group):
            quantised = numbers[row, run * run_size : (run + 1) * run_size]
            total = np.int32(0)
            for i in range(run_size):
                total += np.int32(quantised[i])
            totals[row, run] = total


@numba.njit(**_COMPILED)
def gate(product: Any, bias: Any, kind: int, out: Any, begin: int, end: int) -> None:
    """activation(first half) * second half of each row of the product (T or more, 2 * size): columns [begin, end) of
    `out` (T, size) uint16.
    """
    size = out.shape[1]
    for row in range(out.shape[0]):
        gates, ups = product[row, begin:end], product[row, size + begin : size + end]
        gate_bias, up_bias = bias[begin:end], bias[size + begin : size + end]
        result = out[row, begin:end]
        if kind == SILU:
            for i in range(end - begin):
                x = _with_bias(gates[i], gate_bias, i)
                active = rounded(x / (F1 + exp(-x)))
                result[i] = narrowed(active * _with_bias(ups[i], up_bias, i))
        else:
            for i in range(end - begin):
                active = rounded(_activated(_with_bias(gates[i], gate_bias, i), kind))
                result[i] = narrowed(active * _with_bias(ups[i], up_bias, i))


@numba.njit(**_COMPILED)
def _activated(x: Any, kind: int) -> Any:
    if kind == GELU:
        return x * HALF * np.float32(1.0 + math.erf(x * SQRT_HALF))
    if kind == GELU_TANH:
        return x * HALF * np.float32(1.0 + math.tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)))
    return max(x, F0)


@numba.njit(**_COMPILED)
def place_heads(
    product: Any,
    bias: Any,
    norms: Any,
    eps: float,
    cos: Any,
    sin: Any,
    slots: Any,
    keys_values: Any,
    queries: Any,
    begin: int,
    end: int,
) -> None:
    """Heads [begin, end), counted through all rows, out of a stacked product (T or more, all heads * head_dim) float32:
    turned queries into `queries` (T, heads, head_dim) uint16; turned keys, and values, into `keys_values` (2, kv_heads,
    slots, head_dim) uint16 at `slots` (T,).

    `cos` and `sin` (T, rotary_dim) uint16 are `RopeTable.rows`; norms (2, head_dim) are the weights for queries and for
    keys, or have no elements.
    """
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    num_kv_heads, rotary_dim = keys_values.shape[1], cos.shape[1]
    plain, head = np.empty(head_dim, np.float32), np.empty(head_dim, np.uint16)
    heads_a_row = num_heads + 2 * num_kv_heads
    for each in range(begin, end):
        row, number = each // heads_a_row, each % heads_a_row
        for i in range(head_dim):
            plain[i] = _with_bias(product[row, number * head_dim + i], bias, number * head_dim + i)
        kind = 0 if number < num_heads else 1 if number < num_heads + num_kv_heads else 2
        if kind < 2:
            if norms.size:
                _norm_head_(plain, norms[kind], eps)
            _turn(plain, cos[row], sin[row], head)
            for i in range(rotary_dim, head_dim):
                head[i] = narrowed(plain[i])
        else:
            for i in range(head_dim):
                head[i] = narrowed(plain[i])
        if kind == 0:
            queries[row, number] = head
        else:
            place = number - num_heads - (kind - 1) * num_kv_heads
            keys_values[kind - 1, place, slots[row]] = head


@numba.njit(**_COMPILED)
def _norm_head_(head: Any, weight: Any, eps: float) -> None:
    squares = F0
    for i in range(head.size):
        squares += head[i] * head[i]
    factor = F1 / np.float32(math.sqrt(squares * np.float32(1.0 / head.size) + np.float32(eps)))
    for i in range(head.size):
        head[i] = rounded(rounded(head[i] * factor) * rounded(widened(weight[i])))


@numba.njit(**_COMPILED)
def _turn(head: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.size // 2
    for i in range(half):
        low, high = head[i], head[i + half]
        out[i] = narrowed(rounded(low * widened(cos[i])) + rounded(high * widened(sin[i])))
        turned = rounded(high * widened(cos[i + half])) + rounded(low * widened(sin[i + half]))
        out[i + half] = narrowed(turned)
