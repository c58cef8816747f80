"""Operations on rows, keys and values, one call each: what executors use between layers, and tests one by one.

Every argument is checked, since C trusts its caller. Rows are float32 or uint16 (bf16), contiguous. Calls drop the GIL.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ...models.decoder_config import LayerRotary
from ...models.fields import Norm
from ...models.matrices import Tensor
from ...models.spec import Activation
from ...step.batch import Int64s
from . import arrays, records
from .arrays import NativeDType
from .pools import check_ids
from .products import is_group_count
from .weights import vector_of

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from .arrays import Array

MAX_HEAD_DIM = 576
MAX_CONVOLUTION = 16  # tokens
MAX_DELTA_KEY = 256
DELTA_KEY_STEP = 4  # divides the size of a delta net's keys
MAX_MAMBA_STATE = 256
MAMBA_STATE_STEP = 4  # divides the size of a state
MAX_STREAMS = 4
ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
    Activation.TANH: 4,
    Activation.RELU2: 5,
    Activation.GELU_QUICK: 6,
}

NORMS = {Norm.RMS: 0, Norm.RMS_WIDE: 1, Norm.RMS_PLUS_ONE: 2, Norm.LAYER: 3, Norm.LAYER_PLUS_ONE: 4}
ROTARIES = {LayerRotary.MAIN: 0, LayerRotary.LOCAL: 1, LayerRotary.NONE: 2}

_FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "tn_embed": records.EmbedArgs,
    "tn_add": records.AddArgs,
    "tn_norm": records.NormArgs,
    "tn_activate": records.ActivateArgs,
    "tn_write_heads": records.HeadsArgs,
    "tn_attention": records.AttentionArgs,
    "tn_text_attention": records.TextAttentionArgs,
    "tn_decoder_step": records.DecoderStepArgs,
    "tn_encoder_step": records.EncoderStepArgs,
    "tn_mean": records.MeanArgs,
    "tn_match": records.MatchArgs,
}


class Operations:
    """The functions of one library."""

    def __init__(self, library: Library) -> None:
        """Raises `NativeLibraryError` where the library was built from other declarations."""
        records.check(library)
        self._functions = {name: getattr(library.functions, name) for name in _FUNCTIONS}
        for name, args in _FUNCTIONS.items():
            self._functions[name].argtypes = [ctypes.POINTER(args)]
        self._scale_and_cap = library.functions.tn_scale_and_cap
        self._scale_and_cap.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float]
        self._scale_and_cap.restype = None

    def call(self, name: str, args: ctypes.Structure) -> None:
        """Run a function whose struct of arguments the caller has checked; its size is filled in here."""
        args.size = ctypes.sizeof(args)
        status = self._functions[name](ctypes.byref(args))
        assert status == 0, f"{name} refused: {status}"

    def embed(
        self, table: Array, scale: Array | None, tokens: Int64s, out: Array, factor: float = 1.0
    ) -> Array:
        """out (T, columns) = rows of table (vocab, columns), times their scales (vocab, groups) where it is
        int8, and times the factor. Or the table is (vocab, blocks, bytes of one) of a GGUF file.
        """
        check_ids(tokens, len(table), "a token")
        if table.ndim == 3:
            table_dtype, num_columns = arrays.block_columns(table)
        else:
            table_dtype, num_columns = arrays.dtype_of(table), table.shape[1]
        _check_rows(out, (len(tokens), num_columns))
        arrays.check_contiguous(table, "embeddings")
        if scale is not None:
            arrays.check_contiguous(scale, "scales")
            if scale.shape[0] != len(table) or not is_group_count(scale.shape[1], table.shape[1]):
                raise ValueError(f"scales must be ({len(table)}, groups), not {scale.shape}")
        args = records.EmbedArgs(
            table=arrays.address(table),
            scale=arrays.address_or_null(scale),
            tokens=arrays.address(tokens),
            out=arrays.address(out),
            num_rows=len(out),
            num_columns=out.shape[1],
            table_dtype=table_dtype,
            scale_dtype=0 if scale is None else arrays.dtype_of(scale),
            dtype=arrays.dtype_of(out),
            group_size=0 if scale is None else table.shape[1] // scale.shape[1],
            factor=factor,
        )
        self.call("tn_embed", args)
        return out

    def add(self, x: Array, more: Array, factor: float = 1.0) -> Array:
        """x (T, columns) += more, which has as many rows, or one for all; then x *= factor."""
        _check_rows(x, x.shape)
        _check_rows(more, (len(more), x.shape[1]), x.dtype)
        if len(more) not in (1, len(x)):
            raise ValueError(f"{len(more)} rows cannot be added to {len(x)}")
        args = records.AddArgs(
            x=arrays.address(x),
            more=arrays.address(more),
            num_rows=len(x),
            num_columns=x.shape[1],
            more_stride=0 if len(more) == 1 else x.shape[1],
            dtype=arrays.dtype_of(x),
            factor=factor,
        )
        self.call("tn_add", args)
        return x

    def norm(
        self,
        x: Array,
        out: Array,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        kind: Norm = Norm.RMS,
        factor: float = 1.0,
    ) -> Array:
        """out = the RMS norm of x · factor, or with a bias the layer norm; out may be x. `Norm.LAYER_PLUS_ONE` has a
        bias.
        """
        _check_rows(x, x.shape)
        _check_rows(out, x.shape, x.dtype)
        for tensor in (weight, bias):
            if tensor is not None and tensor.shape != x.shape[1:]:
                raise ValueError(f"a norm's weights must be {x.shape[1:]}, not {tensor.shape}")
        args = records.NormArgs(
            x=arrays.address(x),
            out=arrays.address(out),
            weight=vector_of(weight),
            bias=vector_of(bias),
            num_rows=len(x),
            num_columns=x.shape[1],
            eps=eps,
            dtype=arrays.dtype_of(x),
            kind=NORMS[kind],
            factor=factor,
        )
        self.call("tn_norm", args)
        return out

    def match(self, x: Array, mean: Array | None = None) -> Array:
        """Scale the streams of x (T, streams, columns) to the first one's size, and then make `mean` (T, columns) their
        mean.
        """
        num_rows, num_streams, num_columns = x.shape
        _check_rows(x, x.shape)
        if mean is not None:
            _check_rows(mean, (num_rows, num_columns), x.dtype)
        args = records.MatchArgs(
            x=arrays.address(x),
            mean=arrays.address_or_null(mean),
            num_rows=num_rows,
            num_streams=num_streams,
            num_columns=num_columns,
            dtype=arrays.dtype_of(x),
        )
        self.call("tn_match", args)
        return x

    def scale_and_cap(self, x: Array, scale: float, cap: float | None) -> Array:
        """x (T, columns) fp32 *= scale, then cap · tanh(x / cap)."""
        _check_rows(x, x.shape, np.float32)
        self._scale_and_cap(arrays.address(x), x.size, scale, cap or 0.0)
        return x

    def activate(self, gate: Array, up: Array | None, out: Array, activation: int) -> Array:
        """out = activation(gate) · up, or without `up` the former; out may be one of them."""
        for array in (gate, up, out):
            if array is not None:
                _check_rows(array, gate.shape, gate.dtype)
        args = records.ActivateArgs(
            gate=arrays.address(gate),
            up=arrays.address_or_null(up),
            out=arrays.address(out),
            num_rows=len(gate),
            num_columns=gate.shape[1],
            in_stride=gate.shape[1],
            out_stride=gate.shape[1],
            activation=activation,
            dtype=arrays.dtype_of(gate),
        )
        self.call("tn_activate", args)
        return out

    def text_attention(self, qkv: Array, starts: Int64s, out: Array, scale: float) -> Array:
        """Each text's rows over its own: qkv (T, 3, heads, head_dim) → out (T, heads, head_dim)."""
        num_rows, _, num_heads, head_dim = qkv.shape
        _check_rows(qkv, (num_rows, 3, num_heads, head_dim))
        _check_rows(out, (num_rows, num_heads, head_dim), qkv.dtype)
        check_starts(starts, num_rows)
        args = records.TextAttentionArgs(
            qkv=arrays.address(qkv),
            out=arrays.address(out),
            starts=arrays.address(starts),
            num_texts=len(starts) - 1,
            num_heads=num_heads,
            head_dim=head_dim,
            scale=scale,
            dtype=arrays.dtype_of(qkv),
        )
        self.call("tn_text_attention", args)
        return out

    def mean(self, x: Array, starts: Int64s) -> Array:
        """(N, columns) fp32: the mean of each text's rows of x (T, columns)."""
        _check_rows(x, x.shape)
        check_starts(starts, len(x))
        out = np.empty((len(starts) - 1, x.shape[1]), np.float32)
        args = records.MeanArgs(
            x=arrays.address(x),
            starts=arrays.address(starts),
            out=arrays.address(out),
            num_texts=len(out),
            num_columns=x.shape[1],
            dtype=arrays.dtype_of(x),
        )
        self.call("tn_mean", args)
        return out


def check_starts(starts: Int64s, num_rows: int) -> None:
    """Raises `ValueError` unless they ascend from 0 to the number of rows."""
    check_ids(starts, num_rows + 1, "a text's start")
    if len(starts) < 2 or starts[0] or starts[-1] != num_rows or (np.diff(starts) < 1).any():
        raise ValueError(f"texts must have at least one row each, and all of {num_rows}: {starts}")


def _check_rows(array: Array, shape: tuple[int, ...], dtype: Any = None) -> None:
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        raise ValueError(f"rows must be {shape} {dtype or ''}, not {array.shape} {array.dtype}")
    if arrays.dtype_of(array) not in (NativeDType.F32, NativeDType.BF16):
        raise ValueError(f"rows must be fp32 or bf16 (as uint16), not {array.dtype}")
    arrays.check_contiguous(array, "rows")
