"""The layers that torch computes: activations, norms, rotary positions, and projections of plain
and of quantised matrices.

Statistics of norms are fp32; their results are rounded where transformers rounds, so that tokens
agree. A table of cosines and sines grows on demand, and is rounded to the compute dtype, as in
transformers. Nothing is computed before the first forward pass: torch's thread pool must not have
run in a process that may still fork.

Products read weights at the loader's addresses, which may still be empty when a layer is made.
Those of integers use the dequantised weights, a stretch of rows at a time, and the input unchanged
(`docs/quantize.md`, "The layout", is the specification).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ....loader.format.nibbles import RUN
from ...errors import ModelError
from ...models.experts_config import ClampedSwiglu
from ...models.fields import Norm
from ...models.matrices import (
    BlockMatrix,
    CodeMatrix,
    DenseMatrix,
    Float8Matrix,
    IntegerMatrix,
    Matrix,
    Mxfp4Matrix,
    Projection,
    for_format,
)
from ...models.rotary import Rotary
from ...models.spec import Activation
from ...tensors import Tensor
from .expanded import SCRATCH_ELEMENTS, BlockLinear, CodeLinear, Float8Linear, Mxfp4Linear
from .tensors import to_torch

_DEVICE_SCRATCH_ELEMENTS = 1 << 24  # on a device, where each stretch costs some launches
# The 4-bit level of the number 0, without zero points.
_MIDDLE_4 = 8
_ALIGNMENT = 64  # bytes
# Up to this many rows of input, a product without dequantised weights is faster.
_MAX_PACKED_ROWS = 16


class QuantizedLinear:
    """x @ w.T + bias, where w (N, K) is (q - zero) · scale, with a scale for each G-th of a row.

    - `weight`: (N, K) int8, or (N, K / 2) uint8, two numbers of 4 bits in each
    - `scale`: (N, G), bf16 or fp32; `group_size` is K / G
    - `zero`: (N, G), or None, which means 8 with 4 bits and 0 with 8; uint8 with 4 bits. With 8 it
      is int16, and only some GPTQ checkpoints have it
    - `bias`: (N,) of any float dtype, or None
    - `columns`: (K,) int64, the order of x's columns that the others are in; None: unchanged order
    """

    __slots__ = (
        "bias",
        "bits",
        "columns",
        "group_size",
        "num_in",
        "num_out",
        "scale",
        "weight",
        "zero",
    )

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.scale = scale
        self.zero = zero
        self.bias = bias
        self.bits = 4 if weight.dtype == torch.uint8 else 8
        self.num_out = weight.shape[0]
        self.num_in = weight.shape[1] * 8 // self.bits
        self.group_size = self.num_in // scale.shape[1]
        self.columns = columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) bf16, fp16 or fp32 → (T, N) of the same dtype."""
        if self.columns is not None:
            x = x[:, self.columns]
        if self._takes_integers(x):
            scale = self.scale.view(-1).to(x.dtype)
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, scale)
            return product if self.bias is None else product + self.bias.to(x.dtype)
        # On a CPU products in fp16 may take hundreds of times as long, and the weights are fp32
        # anyway.
        own = x.float() if x.dtype == torch.float16 and x.device.type == "cpu" else x
        out = x.new_empty(x.shape[0], self.num_out)
        scratch = SCRATCH_ELEMENTS if x.device.type == "cpu" else _DEVICE_SCRATCH_ELEMENTS
        step = max(1, scratch // self.num_in)
        for begin in range(0, self.num_out, step):
            end = min(begin + step, self.num_out)
            out[:, begin:end] = F.linear(own, self.rows(begin, end).to(own.dtype))
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of w, clipped to its end, (rows, K) fp32."""
        return dequantize(
            self.weight[begin:end],
            self.scale[begin:end],
            self.zero[begin:end] if self.zero is not None else None,
        )

    def _takes_integers(self, x: torch.Tensor) -> bool:
        """True if torch's own product with int8 rows gives the same result, without rounding a
        scale.
        """
        return (
            self.bits == 8
            and self.zero is None
            and self.scale.shape[1] == 1
            and x.shape[0] <= _MAX_PACKED_ROWS
            and x.device.type == "cpu"
            and x.dtype in (self.scale.dtype, torch.float32)
            # It reads whole vectors from the beginning of each row, and crashes the process if
            # that is not aligned.
            and self.num_in % _ALIGNMENT == self.weight.data_ptr() % _ALIGNMENT == 0
            and x.is_contiguous()
            and x.data_ptr() % _ALIGNMENT == 0
        )


def dequantize(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """The weights of a `QuantizedLinear`'s integers, (N, K) fp32. Memory: a few times the result."""
    levels = unpack_nibbles(weight) if weight.dtype == torch.uint8 else weight
    grouped = levels.view(*scale.shape, -1).to(torch.float32)
    if zero is not None:
        grouped -= zero.unsqueeze(-1)
    elif weight.dtype == torch.uint8:
        grouped -= _MIDDLE_4
    grouped *= scale.unsqueeze(-1).to(torch.float32)
    return grouped.view(levels.shape)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(N, K / 2) uint8 → (N, K) uint8, each below 16; K is a multiple of 64."""
    runs = packed.view(len(packed), -1, RUN // 2)
    return torch.stack([runs & 15, runs >> 4], dim=2).view(len(packed), -1)


def activation(name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    functions: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
        Activation.SILU: F.silu,
        Activation.GELU: F.gelu,
        Activation.GELU_TANH: _gelu_tanh,
        Activation.GELU_QUICK: lambda x: x * torch.sigmoid(1.702 * x),
        Activation.RELU: F.relu,
        Activation.RELU2: lambda x: F.relu(x).square(),
        Activation.TANH: torch.tanh,
    }
    return functions[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, swiglu: ClampedSwiglu) -> torch.Tensor:
    """In fp32, rounded once."""
    g = gate.float().clamp_(max=swiglu.limit)
    u = up.float().clamp_(-swiglu.limit, swiglu.limit)
    return (g * torch.sigmoid(g * swiglu.alpha) * (u + 1.0)).to(gate.dtype)


class RMSNorm:
    """A norm over the last dimension, of one of the kinds of `Norm`. `weight` and `bias` are (size,)."""

    __slots__ = ("bias", "eps", "kind", "weight")

    def __init__(
        self, weight: torch.Tensor, eps: float, kind: Norm = Norm.RMS, bias: torch.Tensor | None = None
    ) -> None:
        self.bias = bias
        self.weight = weight
        self.eps = eps
        self.kind = kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is Norm.RMS:
            return unit_rms(x, self.eps).mul_(self.weight.to(x.dtype))
        wide, factor = x.float(), self.weight.float()
        if self.kind in (Norm.LAYER, Norm.LAYER_PLUS_ONE):
            wide = wide - wide.mean(-1, keepdim=True)
        if self.kind in (Norm.RMS_PLUS_ONE, Norm.LAYER_PLUS_ONE):
            factor = 1.0 + factor
        normed = unit_rms(wide, self.eps).mul_(factor)
        return (normed if self.bias is None else normed.add_(self.bias.float())).to(x.dtype)


class HeadNorm:
    """Norms of queries and keys, of each head separately or of all heads of a row together."""

    __slots__ = ("is_joint", "keys", "num_heads", "queries")

    def __init__(self, queries: RMSNorm, keys: RMSNorm, num_heads: int, *, is_joint: bool) -> None:
        self.queries = queries
        self.keys = keys
        self.num_heads = num_heads
        self.is_joint = is_joint

    def apply_(self, heads: torch.Tensor) -> None:
        """Normalise in place: (T, num_heads query heads, then the key heads, head_dim)."""
        queries, keys = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.queries.kind is Norm.RMS and not self.is_joint:  # one pass for both
            unit = unit_rms(heads, self.queries.eps)
            torch.mul(unit[:, : self.num_heads], self.queries.weight.to(heads.dtype), out=queries)
            torch.mul(unit[:, self.num_heads :], self.keys.weight.to(heads.dtype), out=keys)
            return
        for norm, part in ((self.queries, queries), (self.keys, keys)):
            rows = part.reshape(len(part), 1, -1) if self.is_joint else part
            part.copy_(norm(rows).view(part.shape))


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension. `weight` and `bias` are (size,); None is 0."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x scaled to a root mean square of 1 over its last dimension: a new tensor of x's shape and dtype."""
    wide = x.float()
    # Not mean(): on a CPU it takes as long as everything else together.
    mean_square = (wide * wide).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype)


Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

SMALLEST_TABLE = 512  # positions


class RopeTable:
    """Cosines and sines, (positions, rotary_dim) each. Not thread-safe: one forward pass at a time."""

    def __init__(self, rotary: Rotary, max_context: int, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._max_context = max_context
        self._dtype = dtype
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of these positions, all below `end`: (T, 1, rotary_dim) each, to broadcast
        over heads.

        The first half of each sine is negated, as `rotate_` expects.
        """
        if end > len(self._cos) or self._cos.device != positions.device:
            self._grow(end, positions.device)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The current cosines and sines. Growing replaces them and does not change them."""
        return self._cos, self._sin

    def _grow(self, end: int, device: torch.device) -> None:
        doubled = 1 << (max(end, SMALLEST_TABLE) - 1).bit_length()
        length = max(end, min(doubled, self._max_context))
        cos, sin = (torch.from_numpy(table) for table in self._rotary.tables(0, length))
        self._cos = torch.cat((cos, cos), dim=-1).to(device, self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, self._dtype)


def rotation(*, interleaved: bool, wide: bool) -> Rotation:
    """The function that rotates heads in place: `rotate_` or a variant.

    A wide one rotates in fp32, by cosines and sines in fp32, and rounds once.
    """
    turn = rotate_neighbours_ if interleaved else rotate_
    return partial(_rotate_wide, turn) if wide else turn


def _rotate_wide(turn: Rotation, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    wide = x[..., : cos.shape[-1]].float()
    turn(wide, cos, sin)
    x[..., : cos.shape[-1]] = wide


def rotate_neighbours_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate like `rotate_`, but dimension 2 i pairs with 2 i + 1."""
    size = cos.shape[-1]
    low, high = x[..., 0:size:2], x[..., 1:size:2]
    cos, sin = cos[..., : size // 2], sin[..., size // 2 :]
    turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
    low.copy_(turned_low)
    high.copy_(turned_high)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place the first rotary_dim dimensions of each head of x (T, heads, head_dim).

    `cos` and `sin` are from `RopeTable.rows`. Dimension i pairs with i + rotary_dim / 2, as in the
    checkpoints that transformers writes.
    """
    part = x[..., : cos.shape[-1]]
    crossed = part.roll(cos.shape[-1] // 2, -1).mul_(sin)
    part.mul_(cos).add_(crossed)


Product = Callable[[torch.Tensor], torch.Tensor]  # (T, in) → (T, out)


class Linear:
    """x @ weight.T + bias. `weight` is (out, in), `bias` (out,) or None.

    Weights of another dtype than x, or than the bias, are multiplied in fp32, a stretch of rows at a
    time, so that none of them is rounded.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is self.weight.dtype and (self.bias is None or x.dtype is self.bias.dtype):
            return F.linear(x, self.weight, self.bias)
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The product in fp32, unrounded."""
        wide = x.float()
        num_out, num_in = self.weight.shape
        out = wide.new_empty(*x.shape[:-1], num_out)
        step = max(1, SCRATCH_ELEMENTS // num_in)
        for begin in range(0, num_out, step):
            out[..., begin : begin + step] = F.linear(wide, self.weight[begin : begin + step].float())
        return out if self.bias is None else out.add_(self.bias.float())


class SideBySide:
    """Several products of one input, concatenated: the same result as one product with the stacked
    weights.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class LateProduct:
    """A projection whose matrices are converted at the first use."""

    __slots__ = ("_device", "_kept", "_projection")

    def __init__(self, projection: Projection, device: torch.device) -> None:
        self._projection = projection
        self._device = device
        self._kept: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product()(x)

    def product(self) -> Product:
        """Over the matrices as they are now."""
        if self._kept is not None:
            return self._kept
        product = _product_over(self._projection.matrices(), self._device)
        if self._projection.is_settled:
            self._kept = product
        return product


def product_of(projection: Projection, device: torch.device) -> Product:
    """The product that computes this projection on the weights' device."""
    if projection.is_settled:
        return _product_over(projection.matrices(), device)
    return LateProduct(projection, device)


class RoundedInputs:
    """A product of rows as integers of 8 bits times a row's largest size / 127."""

    __slots__ = ("product",)

    def __init__(self, product: Product) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = 127.0 / wide.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return self.product(((wide * scale).round() / scale).to(x.dtype))


def _product_over(matrices: Sequence[Matrix], device: torch.device) -> Product:
    parts = [_product(matrix, device) for matrix in matrices]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _product(matrix: Matrix, device: torch.device) -> Product:
    return for_format(PRODUCTS, matrix, "torch")(matrix, device)


def _of_dense(matrix: DenseMatrix, device: torch.device) -> Product:
    return Linear(to_torch(matrix.weight), _there(matrix.bias, device))


def _of_mxfp4(matrix: Mxfp4Matrix, device: torch.device) -> Product:
    return Mxfp4Linear(to_torch(matrix.weight), to_torch(matrix.scale), _there(matrix.bias, device))


def _of_codes(matrix: CodeMatrix, device: torch.device) -> Product:
    scale = to_torch(matrix.scale).to(device)
    return CodeLinear(to_torch(matrix.weight), scale, matrix.values, _there(matrix.bias, device))


def _of_float8(matrix: Float8Matrix, device: torch.device) -> Product:
    return Float8Linear(
        to_torch(matrix.weight), to_torch(matrix.scale), matrix.block, _there(matrix.bias, device)
    )


def _of_integers(matrix: IntegerMatrix, device: torch.device) -> Product:
    columns = None if matrix.columns is None else torch.from_numpy(matrix.columns).to(device)
    return QuantizedLinear(
        to_torch(matrix.weight).to(device),
        to_torch(matrix.scale).to(device),
        _there(matrix.zero, device),
        _there(matrix.bias, device),
        columns,
    )


def _there(tensor: Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else to_torch(tensor).to(device)


def _of_blocks(matrix: BlockMatrix, device: torch.device) -> Product:
    if device.type != "cpu":
        raise ModelError(
            f"weights in blocks of a GGUF file ({matrix.block.name}) are computed on a CPU only",
            hint="Serve the GGUF file itself, or pack it with --dequantize; or say --device cpu.",
        )
    return BlockLinear(to_torch(matrix.weight), matrix.block, _there(matrix.bias, device))


PRODUCTS: dict[type[Any], Callable[[Any, torch.device], Product]] = {
    BlockMatrix: _of_blocks,
    CodeMatrix: _of_codes,
    DenseMatrix: _of_dense,
    Float8Matrix: _of_float8,
    IntegerMatrix: _of_integers,
    Mxfp4Matrix: _of_mxfp4,
}
"""The product with each stored format."""
