"""The native core's operations in numpy: what the tests compare with.

Rows are fp32 arrays of numbers that the model's dtype holds: each function rounds where the core does. Sums are
numpy's, so that last bits differ from the core's; but each row is still computed independently of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from teneral.runtime.models.experts_config import ClampedSwiglu, Experts, ExpertShares
from teneral.runtime.models.fields import Norm
from teneral.runtime.models.matrices import (
    BlockMatrix,
    CodeMatrix,
    DenseMatrix,
    Float8Matrix,
    IntegerMatrix,
    Matrix,
    Mxfp4Matrix,
    Tensor,
    for_format,
)
from teneral.runtime.models.spec import Activation
from teneral.runtime.step.batch import Int64s
from teneral.runtime.tensors import DType, from_float32, to_float32

if TYPE_CHECKING:
    from teneral.loader.format.gguf.blocks import BlockType
    from teneral.runtime.backends.native.pools import Pool

Floats = npt.NDArray[np.float32]

CHUNK = 256  # keys, at absolute positions
MAX_CODE = 127
_MIDDLE_4 = 8  # the level that means 0, where there is no zero of its own
_E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # MXFP4's elements
# The numbers of fp8: a sign, four bits of exponent with a bias of 7, three of mantissa, and NaN.
_E4M3 = np.array(
    [
        sign * (np.nan if code == 127 else (code % 8 / 8 + (code > 7)) * 2.0 ** (max(code // 8, 1) - 7))
        for sign in (1, -1)
        for code in range(128)
    ],
    np.float32,
)
_RUN = 64  # elements whose nibbles lie in the same 32 bytes


def sigmoid(x: Floats) -> Floats:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


def rounded(x: Floats, dtype: DType) -> Floats:
    """x rounded to `dtype`, as fp32."""
    return to_float32(from_float32(x, dtype), dtype)


def vector(tensor: Tensor, dtype: DType) -> Floats:
    """A norm's weights, rounded to the compute dtype."""
    return rounded(to_float32(tensor.array, tensor.dtype), dtype)


# ---- products ----


def floats_of(matrix: Matrix) -> Floats:
    """The dequantised matrix, (N, K)."""
    return for_format(FLOATS, matrix, "numpy")(matrix)


def _of_dense(matrix: DenseMatrix) -> Floats:
    return to_float32(matrix.weight.array, matrix.weight.dtype)


def _of_integers(matrix: IntegerMatrix) -> Floats:
    levels = matrix.weight.array
    if matrix.bits == 4:
        runs = levels.reshape(len(levels), -1, _RUN // 2)
        levels = np.stack([runs & 15, runs >> 4], axis=2).reshape(len(levels), -1)
    scale = to_float32(matrix.scale.array, matrix.scale.dtype)
    grouped: Floats = levels.reshape(*scale.shape, -1).astype(np.float32)
    if matrix.zero is not None:
        grouped -= matrix.zero.array[:, :, None]
    elif matrix.bits == 4:
        grouped -= _MIDDLE_4
    grouped *= scale[:, :, None]
    return grouped.reshape(levels.shape)


def _of_mxfp4(matrix: Mxfp4Matrix) -> Floats:
    packed, scale = matrix.weight.array, matrix.scale.array
    values = _E2M1[np.stack([packed & 15, packed >> 4], axis=2)].reshape(*scale.shape, -1)
    exponents = scale.astype(np.int32) - 127
    powers = np.where(scale == 255, np.float32(np.nan), np.ldexp(np.float32(1.0), exponents))
    meant: Floats = (values * powers[:, :, None]).reshape(len(packed), -1)
    return meant


def _of_codes(matrix: CodeMatrix) -> Floats:
    packed, scale = matrix.weight.array, matrix.scale.array
    values = np.array(matrix.values, np.float32)[np.stack([packed >> 4, packed & 15], axis=2)]
    meant: Floats = (values.reshape(*scale.shape, -1) * scale[:, :, None]).reshape(len(packed), -1)
    return meant


def _of_float8(matrix: Float8Matrix) -> Floats:
    rows, columns = matrix.block
    scale = to_float32(matrix.scale.array, matrix.scale.dtype)
    spread = scale.repeat(rows, axis=0)[: matrix.num_out].repeat(columns, axis=1)[:, : matrix.num_in]
    meant: Floats = _E4M3[matrix.weight.array] * spread
    return meant


def _of_blocks(matrix: BlockMatrix) -> Floats:
    return block_rows(matrix.block, matrix.weight.array)


def block_rows(block: BlockType, rows: npt.NDArray[np.uint8]) -> Floats:
    """(N, blocks, bytes of a block) → (N, columns)."""
    return block.to_floats(rows.reshape(-1, block.block_bytes)).reshape(len(rows), -1)


FLOATS: dict[type[Any], Callable[[Any], Floats]] = {
    BlockMatrix: _of_blocks,
    CodeMatrix: _of_codes,
    DenseMatrix: _of_dense,
    Float8Matrix: _of_float8,
    IntegerMatrix: _of_integers,
    Mxfp4Matrix: _of_mxfp4,
}
"""The numbers of each stored format."""


def product(x: Floats, matrix: Matrix, dtype: DType) -> Floats:
    """x @ w.T + bias, rounded once: (T, K) → (T, N)."""
    weights = floats_of(matrix)
    inputs = x if matrix.columns is None else x[:, matrix.columns]
    out = np.empty((len(x), len(weights)), np.float32)
    for number, row in enumerate(inputs):  # by itself: BLAS sums in another order where there are more
        out[number] = weights @ row
    if matrix.bias is not None:
        out += to_float32(matrix.bias.array, matrix.bias.dtype)
    return rounded(out, dtype)


# ---- rows ----


def embed(
    table: Tensor,
    scale: Tensor | None,
    tokens: Int64s,
    dtype: DType,
    factor: float = 1.0,
    block: BlockType | None = None,
) -> Floats:
    """(T, columns)"""
    if block is not None:
        rows = rounded(block_rows(block, table.array[tokens]), dtype)
    else:
        rows = _rows(table, scale, tokens, dtype)
    return rows if factor == 1.0 else rounded(rows * np.float32(factor), dtype)


def _rows(table: Tensor, scale: Tensor | None, tokens: Int64s, dtype: DType) -> Floats:
    rows = table.array[tokens]
    if scale is None:
        return rounded(to_float32(rows, table.dtype), dtype)
    scales = to_float32(scale.array[tokens], scale.dtype)
    grouped = rows.reshape(*scales.shape, -1).astype(np.float32) * scales[:, :, None]
    return rounded(grouped.reshape(rows.shape), dtype)


def norm(
    x: Floats, weight: Tensor, eps: float, dtype: DType, kind: Norm = Norm.RMS, bias: Tensor | None = None
) -> Floats:
    """A norm of one of the kinds; with a bias the layer norm, by 1 + weight of `Norm.LAYER_PLUS_ONE`."""
    if bias is not None:
        own = vector(weight, dtype)
        scale = np.float32(1.0) + own if kind is Norm.LAYER_PLUS_ONE else own
        return layer_norm(x, scale, vector(bias, dtype), eps, dtype)
    if kind is Norm.LAYER:
        x = x - x.sum(-1, keepdims=True) / np.float32(x.shape[-1])
    mean_square = (x * x).sum(-1, keepdims=True) / np.float32(x.shape[-1])
    unit = x * (np.float32(1.0) / np.sqrt(mean_square + np.float32(eps)))
    if kind is Norm.RMS:
        return rounded(rounded(unit, dtype) * vector(weight, dtype), dtype)
    scale = to_float32(weight.array, weight.dtype)
    return rounded(unit * (np.float32(1.0) + scale if kind is Norm.RMS_PLUS_ONE else scale), dtype)


def rounded_to_codes(x: Floats, dtype: DType) -> Floats:
    """Each row as integers of 8 bits times its largest size / 127."""
    scale = np.float32(127.0) / np.maximum(np.abs(x).max(-1, keepdims=True, initial=0.0), np.float32(1e-5))
    return rounded(np.rint(x * scale) / scale, dtype)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, dtype: DType) -> Floats:
    centred = x - x.sum(-1, keepdims=True) / np.float32(x.shape[-1])
    variance = (centred * centred).sum(-1, keepdims=True) / np.float32(x.shape[-1])
    return rounded(centred / np.sqrt(variance + np.float32(eps)) * weight + bias, dtype)


def activate(gate: Floats, up: Floats | None, activation: Activation, dtype: DType) -> Floats:
    """activation(gate) · up, or without `up` the former."""
    with np.errstate(over="ignore"):
        active = rounded(_activation(gate, activation), dtype)
    return active if up is None else rounded(active * up, dtype)


def clamped_swiglu(gate: Floats, up: Floats, swiglu: ClampedSwiglu, dtype: DType) -> Floats:
    g = np.minimum(gate, np.float32(swiglu.limit))
    u = np.clip(up, np.float32(-swiglu.limit), np.float32(swiglu.limit))
    with np.errstate(over="ignore"):
        active = g / (np.float32(1.0) + np.exp(np.float32(-swiglu.alpha) * g))
    return rounded(active * (u + np.float32(1.0)), dtype)


def _activation(x: Floats, activation: Activation) -> Floats:
    one = np.float32(1.0)
    match activation:
        case Activation.TANH:
            result: Any = np.tanh(x)
        case Activation.SILU:
            result = x / (one + np.exp(-x))
        case Activation.GELU:
            result = x * np.float32(0.5) * (one + _erf(x * np.float32(math.sqrt(0.5))))
        case Activation.GELU_TANH:
            inner = (x + np.float32(0.044715) * (x * x * x)) * np.float32(math.sqrt(2.0 / math.pi))
            result = x / (one + np.exp(-2.0 * inner))
        case Activation.GELU_QUICK:
            result = x / (one + np.exp(np.float32(-1.702) * x))
        case Activation.RELU:
            result = np.maximum(x, np.float32(0.0))
        case Activation.RELU2:
            result = np.square(np.maximum(x, np.float32(0.0)))
    return np.asarray(result, np.float32)


def _erf(x: Floats) -> Floats:
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float32, x.size).reshape(x.shape)


def route(
    scores: Floats, experts: Experts, dtype: DType, correction: Floats | None = None
) -> tuple[Int64s, Floats]:
    """The experts of each row by its scores (T, experts.num), and their weights: (T, num_used) each. `correction`
    (experts.num,) is added to shares to choose.
    """
    if experts.shares is ExpertShares.SIGMOID:
        shares = sigmoid(scores)
    else:
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        shares = powers / powers.sum(-1, keepdims=True)
    numbers = shares if correction is None else shares + correction
    if correction is None and experts.shares is ExpertShares.SIGMOID:
        numbers = scores  # which order as sigmoids do, and are not all 1 where they are high
    if experts.num_groups_used < experts.num_groups:
        groups = numbers.reshape(len(numbers), experts.num_groups, -1)
        best = np.sort(groups, axis=-1)[..., -1 if correction is None else -2 :].sum(-1)
        others = np.argsort(-best, axis=-1, kind="stable")[:, experts.num_groups_used :]
        np.put_along_axis(groups := groups.copy(), others[:, :, None], -np.inf, axis=1)
        numbers = groups.reshape(numbers.shape)
    chosen = np.argsort(-numbers, axis=-1, kind="stable")[:, : experts.num_used]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    if experts.sum_to_1:
        weights = weights / (weights.sum(-1, keepdims=True) + np.float32(experts.sum_eps))
    weights = weights * np.float32(experts.factor)
    return chosen, rounded(weights, dtype) if experts.rounds_weights else weights


# ---- keys and values ----


def scale_and_cap(x: Floats, scale: float, cap: float | None) -> Floats:
    """x · scale, then cap · tanh(x / cap)."""
    scaled = x * np.float32(scale)
    return scaled if cap is None else np.tanh(scaled / np.float32(cap)) * np.float32(cap)


def turn(heads: Floats, turns: Floats, dtype: DType, inner: DType, *, interleaved: bool = False) -> Floats:
    """heads (T, heads, head_dim) by turns (T, rotary_dim), cosines and then sines. Products are rounded to `inner`."""
    half = turns.shape[1] // 2
    cos, sin = turns[:, None, :half], turns[:, None, half:]
    first = slice(0, 2 * half, 2) if interleaved else slice(half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    low, high = heads[..., first], heads[..., second]
    turned = heads.copy()
    turned[..., first] = rounded(rounded(low * cos, inner) - rounded(high * sin, inner), dtype)
    turned[..., second] = rounded(rounded(high * cos, inner) + rounded(low * sin, inner), dtype)
    return turned


def to_codes(heads: Floats, dtype: DType) -> tuple[npt.NDArray[np.int8], Floats]:
    """(…, head_dim) → codes, and scales (…, 1) that `dtype` holds. The codes of what is not finite are 0."""
    scales = rounded(np.abs(heads).max(-1, keepdims=True) / np.float32(MAX_CODE), dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.nan_to_num(heads / scales, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(np.rint(exact), -MAX_CODE, MAX_CODE).astype(np.int8), scales


def of_codes(codes: npt.NDArray[np.int8], scales: Floats, dtype: DType) -> Floats:
    with np.errstate(invalid="ignore"):
        return rounded(codes.astype(np.float32) * scales, dtype)


def attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    seen: tuple[int, int],
    scale: float,
    dtype: DType,
    cap: float | None = None,
    more: Floats | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """One row's queries (heads, head_dim) over keys and values (kv_heads, num_keys, head_dim) of which it sees the
    range `seen`: (heads, head_dim), chunk by chunk. With a `cap` scores s become cap · tanh(s / cap); `more`
    (heads, num_keys) is added to scaled scores; `sinks` (heads,) are scores of a key without a value.
    """
    num_kv_heads, _, head_dim = keys.shape
    grouped = queries.reshape(num_kv_heads, -1, head_dim)
    largest = np.full((*grouped.shape[:2], 1), -1e30, np.float32)
    total = np.zeros_like(largest)
    out = np.zeros_like(grouped)
    begin, end = seen
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        part = slice(max(chunk, begin), min(chunk + CHUNK, end))
        scores = scale_and_cap(np.einsum("hgd,hkd->hgk", grouped, keys[:, part]), scale, cap)
        if more is not None:
            scores = scores + more[:, part].reshape(scores.shape)
        of_chunk = scores.max(-1, keepdims=True)
        powers = np.exp(scores - of_chunk)
        most = np.maximum(largest, of_chunk)
        before, now = np.exp(largest - most), np.exp(of_chunk - most)
        total = total * before + powers.sum(-1, keepdims=True) * now
        out = out * before + np.einsum("hgk,hkd->hgd", powers, values[:, part]) * now
        largest = most
    if sinks is not None:
        sink = sinks.reshape(largest.shape)
        most = np.maximum(largest, sink)
        out = out * np.exp(largest - most)
        total = total * np.exp(largest - most) + np.exp(sink - most)
    return rounded((out / total).reshape(queries.shape), dtype)


def write(pool: Pool, layer: int, slots: Int64s, heads: Floats, dtype: DType) -> None:
    """heads (parts, T, num_kv_heads, head_dim): keys, then values, or latents."""
    by_head = heads.transpose(0, 2, 1, 3)
    if pool.scales is None:
        pool.data[layer][:, :, slots] = from_float32(by_head, dtype)
        return
    codes, scales = to_codes(by_head, dtype)
    pool.data[layer][:, :, slots] = codes
    pool.scales[layer][:, :, slots] = from_float32(scales, dtype)


def read(pool: Pool, layer: int, slots: Int64s, dtype: DType) -> tuple[Floats, Floats]:
    """Keys and values, (num_kv_heads, len(slots), head_dim) each; both are latents where these are all there is."""
    stored = pool.data[layer][:, :, slots]
    if pool.scales is None:
        parts = to_float32(stored, dtype)
    else:
        parts = of_codes(stored, to_float32(pool.scales[layer][:, :, slots], dtype), dtype)
    return parts[0], parts[-1]
