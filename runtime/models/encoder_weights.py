"""An encoder's weights: of a text model, or of an image tower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from ..tensors import Tensor
    from ..weights import Gate, RowGate
    from .matrices import DenseMatrix, LayerNormWeights, Projection


class EncoderLayerWeights(Struct, frozen=True, eq=False):
    qkv: Projection
    output: Projection
    attention_norm: LayerNormWeights | None  # None: the layer's attention takes x itself
    up: Projection  # of a gated MLP: gate, then up
    down: Projection
    mlp_norm: LayerNormWeights
    gate: Gate
    position_qk: Projection | None = None  # to queries and keys of disentangled positions; None: `qkv` is
    attention_output_norm: Tensor | None = None  # (hidden,), of what it adds
    mlp_output_norm: Tensor | None = None
    query_norm: Tensor | None = None  # (head_dim,)
    key_norm: Tensor | None = None
    value_norm: Tensor | None = None
    # () each, four of a matrix: what its inputs are at least and at most, then its outputs; of queries, keys, values,
    # output, gate, up and down.
    bounds: tuple[Tensor, ...] = ()


class EncoderWeights(Struct, frozen=True, eq=False):
    """An encoder's weights; a classifier's have `dense` and `scores`. None: the model has none of the kind."""

    words: Tensor  # (vocab, embedding)
    positions: Tensor | None  # (max_positions, embedding)
    types: Tensor | None  # (type_vocab, embedding): row 0 is that of single texts
    norm: LayerNormWeights | None  # of embeddings
    layers: tuple[EncoderLayerWeights, ...]
    entry_gate: RowGate  # of all that a layer does not hold
    projection: Projection | None = None  # of embeddings, which are narrower than hidden or not, to hidden
    # Of a position bias (num_buckets, num_heads); disentangled (2 span, hidden).
    relative: Tensor | None = None
    relative_norm: LayerNormWeights | None = None  # of disentangled positions
    final_norm: LayerNormWeights | None = None
    dense: Projection | None = None
    head_norm: LayerNormWeights | None = None
    scores: Projection | None = None
    sentence: tuple[DenseMatrix, ...] = ()  # what embeddings pass through, there from the start
    head_gate: Gate | None = None  # of the final norm and a classifier's head

    @property
    def device(self) -> str:
        return self.words.device
