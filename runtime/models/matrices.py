"""Weights as an executor takes them: arrays with their types, matrices, and the matrices of each layer.

Storage exists, at its final address, when these values are made; its content arrives later, and is there once the gate
of its layer is open. Nothing here is copied or computed, but for matrices of GPTQ and AWQ (`Projection.matrices`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..errors import ModelError
from ..tensors import DType, Tensor

if TYPE_CHECKING:
    from ...loader.format.gguf.blocks import BlockType
    from ..weights import ExpertGate, Gate, RowGate, Strip

__all__ = [
    "BlockMatrix",
    "CodeMatrix",
    "DecoderLayerWeights",
    "DecoderWeights",
    "DenseMatrix",
    "EmbeddingTable",
    "Float8Matrix",
    "IntegerMatrix",
    "Matrix",
    "Mxfp4Matrix",
    "Projection",
    "StoredProjection",
    "Tensor",
    "for_format",
]

Made = TypeVar("Made")


class Matrix(Protocol):
    """y = x @ w.T + bias, of w (N, K) in one stored number format.

    A format is a class, a row in `projections.FORMATS`, and a product in each backend that computes it.
    """

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def columns(self) -> npt.NDArray[np.int64] | None:
        """(K,): x[:, columns] takes the place of x."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_out(self) -> int: ...

    @property
    def kind(self) -> Hashable:
        """Equal for matrices of a format that can be one, if they lie back to back."""

    def joined(self, others: Sequence[Any]) -> Matrix | None:
        """One matrix over the tensors of this one and of others of its kind, as views; None unless these
        lie back to back.
        """


def for_format(table: Mapping[type[Any], Made], matrix: Matrix, backend: str) -> Made:
    """The entry for the matrix's format. Raises `ModelError` for one that the backend does not compute."""
    found = table.get(type(matrix))
    if found is None:
        raise ModelError(
            f"{backend} does not multiply with a {type(matrix).__name__}", hint="Choose another --backend."
        )
    return found


class _InOrder:
    """A matrix of a row for each output, whose columns are in the order of its inputs."""

    __slots__ = ()

    @property
    def columns(self) -> None:
        return None

    @property
    def num_out(self) -> int:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        return weight.shape[0]

    def joined(self, others: Sequence[Any]) -> Matrix | None:
        return None


class _InNibbles(_InOrder):
    """Likewise, of two columns a byte."""

    __slots__ = ()

    @property
    def num_in(self) -> int:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        return weight.shape[1] * 2


class DenseMatrix(_InOrder, Struct, frozen=True, eq=False):
    """y = x @ weight.T + bias."""

    weight: Tensor  # (N, K) BF16, F16 or F32
    bias: Tensor | None = None  # (N,) of the same type

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    @property
    def kind(self) -> Hashable:
        return DenseMatrix, self.weight.dtype

    def joined(self, others: Sequence[DenseMatrix]) -> DenseMatrix | None:
        parts = (self, *others)
        weight, bias = _whole([part.weight for part in parts]), _whole([part.bias for part in parts])
        if weight is None or (self.bias is not None and bias is None):
            return None
        return DenseMatrix(weight, bias)


class IntegerMatrix(Struct, frozen=True, eq=False):
    """y = x @ w.T + bias of w (N, K) = (q - zero) · scale, with a scale for each of G equal groups of a row.

    docs/quantize.md, "The layout", is the norm.
    """

    weight: Tensor  # (N, K) I8, or (N, K / 2) U8, two numbers of 4 bits in each: K is a multiple of 64 then
    scale: Tensor  # (N, G) BF16, F16 or F32; G divides K
    zero: Tensor | None = None  # (N, G) U8 with 4 bits, I16 with 8; None means 8 with 4 bits and 0 with 8
    bias: Tensor | None = None  # (N,) BF16, F16 or F32
    # (K,): x[:, columns] takes the place of x (GPTQ's act-order).
    columns: npt.NDArray[np.int64] | None = None

    @property
    def bits(self) -> int:
        return 4 if self.weight.dtype is DType.U8 else 8

    @property
    def num_in(self) -> int:
        return self.weight.shape[1] * 8 // self.bits

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    @property
    def group_size(self) -> int:
        return self.num_in // self.scale.shape[1]

    @property
    def kind(self) -> Hashable:
        return IntegerMatrix, self.weight.dtype, self.group_size, self.zero is None

    def joined(self, others: Sequence[IntegerMatrix]) -> IntegerMatrix | None:
        parts = (self, *others)
        weight, scale = _whole([part.weight for part in parts]), _whole([part.scale for part in parts])
        zero, bias = _whole([part.zero for part in parts]), _whole([part.bias for part in parts])
        some_lack = any(
            whole is None and any(tensor is not None for tensor in tensors)
            for whole, tensors in (
                (zero, [part.zero for part in parts]),
                (bias, [part.bias for part in parts]),
            )
        )
        if weight is None or scale is None or some_lack:
            return None
        return IntegerMatrix(weight, scale, zero, bias)


def _whole(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return there[0].stacked_with(there[1:]) if len(there) == len(tensors) else None


MXFP4_GROUP = 32  # columns that share a scale


class Mxfp4Matrix(_InNibbles, Struct, frozen=True, eq=False):
    """y = x @ w.T + bias of w (N, K) in MXFP4, as the OCP's Microscaling Formats 1.0 define it: E2M1 elements, and an
    E8M0 scale for each 32 columns. Rows of all tensors may lie apart, equally far.
    """

    weight: Tensor  # (N, K / 2) U8: columns 2 i and 2 i + 1 in the low and the high half of byte i
    scale: Tensor  # (N, K / 32) U8: 2 ** (scale - 127); 255 is NaN
    bias: Tensor | None = None  # (N,) BF16, F16 or F32

    @property
    def kind(self) -> Hashable:
        return Mxfp4Matrix


class Float8Matrix(_InOrder, Struct, frozen=True, eq=False):
    """y = x @ w.T + bias of w (N, K) = q · scale, with q in E4M3 and a scale for each block of rows and columns.

    A block may be one row, or the whole matrix; edges cut blocks off.
    """

    weight: Tensor  # (N, K) F8_E4M3
    scale: Tensor  # (N / block[0], K / block[1]), both rounded up, BF16, F16 or F32
    block: tuple[int, int]
    bias: Tensor | None = None  # (N,) BF16, F16 or F32

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    @property
    def kind(self) -> Hashable:
        return Float8Matrix, self.block

    def joined(self, others: Sequence[Float8Matrix]) -> Float8Matrix | None:
        parts = (self, *others)
        weight, scale = _whole([part.weight for part in parts]), _whole([part.scale for part in parts])
        bias = _whole([part.bias for part in parts])
        some_lack_bias = bias is None and any(part.bias is not None for part in parts)
        is_cut = any(part.num_out % self.block[0] for part in parts[:-1])
        if weight is None or scale is None or some_lack_bias or is_cut:
            return None
        return Float8Matrix(weight, scale, self.block, bias)


class BlockMatrix(_InOrder, Struct, frozen=True, eq=False):
    """y = x @ w.T + bias of w (N, K) in blocks as GGUF files have them: levels, and their scales with them."""

    weight: Tensor  # (N, K / columns of a block, bytes of a block) U8
    block: BlockType
    bias: Tensor | None = None  # (N,) BF16, F16 or F32

    @property
    def num_in(self) -> int:
        return self.weight.shape[1] * self.block.elements

    @property
    def kind(self) -> Hashable:
        return BlockMatrix, self.block.name

    def joined(self, others: Sequence[BlockMatrix]) -> BlockMatrix | None:
        parts = (self, *others)
        weight, bias = _whole([part.weight for part in parts]), _whole([part.bias for part in parts])
        if weight is None or (self.bias is not None and bias is None):
            return None
        return BlockMatrix(weight, self.block, bias)


class CodeMatrix(_InNibbles, Struct, frozen=True, eq=False):
    """y = x @ w.T + bias of w (N, K): the values of codes, times a scale for each of G equal groups of a row."""

    weight: Tensor  # (N, K / 2) U8: columns 2 i and 2 i + 1 in the high and the low half of byte i
    scale: Tensor  # (N, G) F32; a group is a multiple of 64 columns
    codes: str  # "nf4" or "fp4"
    values: tuple[float, ...]  # of the 16 codes
    bias: Tensor | None = None  # (N,) BF16, F16 or F32

    @property
    def kind(self) -> Hashable:
        return CodeMatrix, self.codes


class Projection(Protocol):
    """One product, (T, K) → (T, N): matrices of the same input, whose outputs lie side by side in this order."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_out(self) -> int: ...

    @property
    def is_settled(self) -> bool:
        """True if `matrices` gives the same objects from now on. Always so of matrices that are used as stored."""

    @property
    def may_reorder_columns(self) -> bool:
        """True if `IntegerMatrix.columns` may be there (GPTQ's `desc_act`). Known before the content."""

    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices to multiply with, behind the layer's open gate. Matrices of GPTQ and AWQ are
        converted by the first call, which takes a while, and again by each call until their content
        is exact.
        """


class StoredProjection(Struct, frozen=True, eq=False):
    """Matrices that are used where the loader put them: one, where their rows lie back to back."""

    parts: tuple[Matrix, ...]

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def is_settled(self) -> bool:
        return True

    @property
    def may_reorder_columns(self) -> bool:
        return False

    def matrices(self) -> tuple[Matrix, ...]:
        return self.parts


class EmbeddingTable(Struct, frozen=True, eq=False):
    """A row for each token: floats, or int8 times the scales of its groups, or blocks, rounded to the spec's dtype."""

    weight: Tensor  # (vocab, hidden) BF16, F16, F32, or I8; or (vocab, blocks, bytes of a block) U8
    scale: Tensor | None = None  # (vocab, G) BF16, F16 or F32, where the weight is I8; G divides hidden
    block: BlockType | None = None  # of a weight in blocks


class ExpertWeights(Struct, frozen=True, eq=False):
    gate_up: Projection  # gate, then up
    down: Projection


class DeltaNetWeights(Struct, frozen=True, eq=False):
    """Tensors of a gated delta net between its projections. Computed with in the spec's dtype."""

    taps: Tensor  # (queries, keys and values of all heads, 1, size): a row's own token is the last
    log: Tensor  # (num_value_heads,): of what decays, and the bias of how long
    bias: Tensor
    norm: Tensor  # (value_size,)


class MambaWeights(Struct, frozen=True, eq=False):
    """A Mamba-2 layer's tensors. Those between its projections are computed with in the spec's dtype."""

    inputs: Projection  # to what `Mamba.projected` says
    output: Projection
    taps: Tensor  # (values of all heads, keys and queries of all groups, 1, size): a row's own token is the last
    taps_bias: Tensor | None  # one for each of these
    log: Tensor  # (num_heads,) each: of the speed of decay, the bias of time steps, and of values added to outputs
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None  # (num_values,)


class LayerInputWeights(Struct, frozen=True, eq=False):
    """Of what a layer does with its own inputs."""

    gate: Projection  # (size, hidden)
    up: Projection  # (hidden, size)
    norm: Tensor  # (hidden,)


class StreamWeights(Struct, frozen=True, eq=False):
    """Of what a layer predicts and corrects streams of x with: floats of any of BF16, F16, F32."""

    norm: Tensor  # (hidden,)
    router: Tensor  # (streams, hidden)
    predictions: Tensor  # (streams * streams, streams)
    corrections: Tensor  # (streams, streams)
    scale: Tensor | None  # (hidden,)


class LaurelWeights(Struct, frozen=True, eq=False):
    """Of a product next to attention."""

    down: Projection  # (rank, hidden)
    up: Projection  # (hidden, rank)
    norm: Tensor  # (hidden,)


class JoinedMixtureWeights(Struct, frozen=True, eq=False):
    """Of a mixture that joins its layer's MLP, (hidden,) each."""

    router_norm: Tensor
    expert_norm: Tensor
    expert_output_norm: Tensor
    mlp_output_norm: Tensor  # before the sum of both
    expert_factors: Tensor  # (num_experts,)


class LayerNormWeights(Struct, frozen=True, eq=False):
    """(hidden,) each, of any of BF16, F16, F32."""

    weight: Tensor
    bias: Tensor | None


class CrossAttentionWeights(Struct, frozen=True, eq=False):
    """Of a layer's attention over an encoder's rows."""

    norm: LayerNormWeights
    query: Projection
    keys: Projection  # of the encoder's rows, to keys, then values
    output: Projection


class DecoderLayerWeights(Struct, frozen=True, eq=False):
    """Norm weights are (size,) of any of BF16, F16, F32. `Norm.RMS` rounds them to the spec's dtype first."""

    gate: Gate
    attention_norm: Tensor | None = None  # (hidden,)
    # Query heads, key heads, value heads, (head_dim) numbers each; of a convolution, three rows; of latents the inputs
    # of `query_up`, or query heads where there is none, and then a latent and a key; of a gated delta net what
    # `DeltaNets.projected` says. None: the layer does not attend.
    qkv: Projection | None = None
    output: Projection | None = None  # likewise
    mlp_norm: Tensor | None = None
    gate_up: Projection | None = None  # gate, then up, or up alone; of a mixture the shared expert's, or None
    down: Projection | None = None
    query_norm: Tensor | None = None  # (head_dim,), or of all heads together; of latents (query_rank,)
    key_norm: Tensor | None = None  # likewise; of latents (rank,)
    query_up: Projection | None = None  # of latents
    key_value_up: Projection | None = None  # of latents: each head's plain_dim rows for keys, then value_dim
    convolution: Tensor | None = None  # (hidden, 1, size) in place of attention; a row's own token is last
    convolution_bias: Tensor | None = None  # (hidden,)
    delta_net: DeltaNetWeights | None = None  # in place of attention
    mamba: MambaWeights | None = None  # likewise, or parallel to it
    router: Projection | None = None  # to the experts' scores
    shared_gate: Projection | None = None  # to a number whose sigmoid multiplies the shared expert's output
    correction: Tensor | None = None  # (num_experts,), added to shares to choose
    experts: tuple[ExpertWeights, ...] = ()
    router_gate: Gate | None = None  # of a mixture, all but its experts
    expert_gate: ExpertGate | None = None  # of these, by their numbers; None: they are stored as one
    attention_norm_bias: Tensor | None = None  # (hidden,)
    mlp_norm_bias: Tensor | None = None
    attention_inner_norm: Tensor | None = None  # (num_heads * head_dim,), of the input of `output`
    mlp_inner_norm: Tensor | None = None  # (intermediate,), of that of `down`
    attention_output_norm: Tensor | None = None  # (hidden,)
    mlp_output_norm: Tensor | None = None
    sinks: Tensor | None = None  # (num_heads,)
    value_norm: Tensor | None = None  # (head_dim,)
    inputs: LayerInputWeights | None = None
    scalar: Tensor | None = None  # (1,), of all that the layer makes
    streams: StreamWeights | None = None
    laurel: LaurelWeights | None = None
    joined_mixture: JoinedMixtureWeights | None = None  # of a mixture that joins the MLP
    cross: CrossAttentionWeights | None = None  # between attention and MLP


class DecoderWeights(Struct, frozen=True, eq=False):
    """A decoder's weights, with the gates behind which they become readable."""

    embeddings: EmbeddingTable
    layers: tuple[DecoderLayerWeights, ...]
    norm: Tensor
    head: Projection
    entry_gate: RowGate  # of those rows of the embeddings that a step has, and of all positions
    head_gate: Gate  # of the norm and the head
    all_gate: Gate
    head_strips: tuple[Strip, ...] = ()  # of its rows, where they arrive one by one
    size_bytes: int = 0  # of all tensors that came with the model
    norm_bias: Tensor | None = None
    positions: Tensor | None = None  # (max_context, hidden) BF16, F16 or F32
    input_embeddings: EmbeddingTable | None = None  # (vocab, num_layers * size): of layers' inputs
    input_projection: Projection | None = None  # of a token's first x, to as many
    input_norm: Tensor | None = None  # (size,)
    # (hidden, hidden) of each stream of x but the first: to it before the first layer, from it behind the last one.
    stream_inputs: tuple[Projection, ...] = ()
    stream_outputs: tuple[Projection, ...] = ()

    @property
    def device(self) -> str:
        return self.embeddings.weight.device
