"""A model as a value: everything that an executor needs to know of it beyond its weights.

A `DecoderSpec` or `EncoderSpec` is made from a checked config.json, and nothing that changes the
result is anywhere else. An executor lists every field that it implements, and refuses a spec with a
field or a value that it does not know (`executor.refusal_of`): so a new field here is refused
everywhere until each executor has learnt it.
"""

from __future__ import annotations

import enum
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from ..kv.storage import KVLayers, PoolShape
from ..tensors import DType, from_float32, to_float32
from .decoder_config import (
    DecoderConfig,
    LatentAttention,
    LayerRotary,
    LayerShape,
    QueryScaling,
    ShortConvolutions,
    Sublayers,
)
from .fields import Norm
from .rotary import Rotary

if TYPE_CHECKING:
    from .delta_nets_config import DeltaNets
    from .encoder_config import Disentangled, EncoderConfig, PositionBias
    from .experts_config import Experts
    from .layer_inputs_config import LayerInputs, Streams
    from .mamba_config import Mamba


class Activation(enum.StrEnum):
    """Functions of one number. `config.ACTIVATIONS` has the names that config.json files use."""

    SILU = "silu"  # x / (1 + exp(-x))
    GELU = "gelu"  # x · Φ(x), by the error function
    GELU_TANH = "gelu_tanh"  # its approximation by a tanh
    GELU_QUICK = "gelu_quick"  # x / (1 + exp(-1.702 x))
    RELU = "relu"
    RELU2 = "relu2"  # its square
    TANH = "tanh"


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.GELU_QUICK,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "tanh": Activation.TANH,
}


def activation_of(name: str) -> Activation | None:
    """The activation of this name in a config; None for ''."""
    return _ACTIVATIONS[name] if name else None


class Pooling(enum.StrEnum):
    """The reduction of a text's token states to one row. `pooling_config.POOLING_MODES` has these
    names.
    """

    MEAN = "mean"
    CLS = "cls"  # the first token's
    MAX = "max"  # of each column
    LAST = "lasttoken"
    MEAN_SQRT = "mean_sqrt_len_tokens"  # their sum, divided by the root of their number
    WEIGHTED_MEAN = "weightedmean"  # token p, from 1, counts p times


class KVPlace(NamedTuple):
    """The place of a layer's keys and values: in one of a pool's groups of layers of the same sizes."""

    group: int
    layer: int  # of that group; a convolution's inputs are in those from this one on


class DecoderSpec(Struct, frozen=True):
    """A decoder whose layers are x + attention(norm(x)), then x + down(activation(gate(y)) · up(y))
    of y = norm(x), or without a gate x + down(activation(up(y))).

    Where there are output norms, what attention and MLP add to x is normalised first, and then
    scaled. Keys and values are what the rotation (of keys) and the projections give, in `dtype`. A
    token sees itself and what came before it; with `is_bidirectional`, what comes after it, too.
    """

    dtype: DType  # of activations, keys and values: BF16, F16 or F32; sums are in fp32
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # this, and the next sizes: the most of any layer
    num_layers: int
    num_heads: int  # a multiple of num_kv_heads
    num_kv_heads: int
    head_dim: int
    layer_shapes: tuple[LayerShape, ...]  # of each layer
    layer_inputs: LayerInputs | None
    streams: Streams | None  # of x, scaled to one size before the first layer and behind the last one
    laurel_rank: int  # of a product next to attention; 0: there is none
    gate_cuts: tuple[float | None, ...]  # of each layer, as `DecoderConfig` has them
    layer_scalars: bool  # a number that x is multiplied with at each layer's end, rounded
    norm: Norm  # of all norms
    norm_eps: float
    norm_bias: bool  # of input norms and the final one, which are layer norms then
    input_norms: bool  # before attention and MLP
    output_norms: bool  # behind them
    inner_norms: bool  # before their last projections
    rounds_inputs: bool  # of layers' projections to 8 bits: integers times a row's largest number / 127
    is_parallel: bool  # x + attention(y) + mlp(y) of y = norm(x)
    parallel_norms: bool  # then attention and MLP have a norm of x each
    interleaved_qkv: (
        bool  # a row has each head's query, key and value together, not all queries, keys, values
    )
    attention_scale: float  # scores are query · key times this
    score_cap: float | None  # scores s become cap · tanh(s / cap)
    logit_cap: float | None  # likewise, after logits_scale
    embedding_scale: (
        float  # what the embeddings' rows are multiplied with: rows and products are rounded to dtype
    )
    learned_positions: bool  # then a row of each position is added to them
    residual_scale: float  # likewise what attention and MLP add
    mlp_output_scale: float  # likewise what the MLP adds, before that
    gate_scale: float  # likewise an MLP's gates, before the activation
    attention_output_scale: float  # likewise outputs of attention that has Mamba-2 parallel to it
    logits_scale: float
    activation: Activation
    experts: Experts | None  # in place of the MLP of some layers
    convolutions: ShortConvolutions | None  # in place of the attention of some layers
    latent: LatentAttention | None  # the pool has these in place of keys and values
    # In place of the attention of some layers, which have a state of each sequence, and no keys and values.
    delta_nets: DeltaNets | None
    mamba: Mamba | None  # likewise, or parallel to it
    sublayers: tuple[Sublayers, ...]  # of each layer
    rotary: Rotary
    local_rotary: Rotary | None
    layer_rotary: tuple[LayerRotary, ...]  # which of them turns a layer's queries and keys
    wide_rotary: (
        bool  # they are turned in fp32 and rounded once; otherwise cos, sin and each product are rounded
    )
    max_context: int  # tokens of prompt and answer together
    windows: tuple[int | None, ...]  # a layer: how many tokens back a token sees, itself included; None: all
    chunked_windows: (
        bool  # a token sees those of its window whose positions, divided by its size, equal its own
    )
    query_scaling: QueryScaling | None
    is_bidirectional: bool  # a step has all tokens of its texts, and windows are tokens to each side
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool  # of gate, up and down
    gated_mlp: bool
    head_bias: bool
    head_norms: (
        bool  # queries and keys are normalised before they are turned; a weight is (head_dim,) for each head
    )
    value_norms: bool  # values likewise, by norms without weights
    late_head_norms: bool  # once they are turned; not with joint norms
    joint_head_norms: (
        bool  # all heads of a row as one instead, with weights of (num_heads * head_dim,) and likewise
    )
    gated_attention: bool  # outputs are times the sigmoid of a gate, which each head's query has behind it
    sinks: bool  # exp(sink) of each head is added to the sum that its exponentials are divided by
    tied_head: bool  # the head's matrix is the embeddings'
    # (rotary.dim / 2,): the axis, of three, whose position turns each number, where an image's tokens have rows and
    # columns (M-RoPE, arXiv 2409.12191, section 2.1); empty: a token has one position.
    rotary_axes: tuple[int, ...]
    takes_images: bool  # rows of a vision tower take the places of embeddings
    # Behind each of this number of first layers, an image's next rows are added to those of its tokens (DeepStack,
    # arXiv 2406.04334).
    num_deep_rows: int
    whole_images: bool  # the tokens of an image see one another, those before them as far as a window reaches
    windowed_images: bool  # but not in layers without a window
    # The first tokens of a sequence are this many rows of an encoder, which pass through no layer: each makes keys and
    # values of them, which the others see by attention of its own between attention and MLP (cross-attention).
    source_len: int

    @classmethod
    def of(cls, config: DecoderConfig, dtype: DType) -> DecoderSpec:
        names, local = config.names, config.local_rope
        rotary = partial(Rotary.of, interleaved=config.interleaved_rotary)
        embedding_scale, shapes = (
            config.embedding_scale,
            tuple(map(config.shape_of, range(config.num_layers))),
        )
        if config.scales_embeddings:
            embedding_scale = rounded(config.hidden_size**0.5, dtype)
        return cls(
            dtype=dtype,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=max(shape.intermediate_size for shape in shapes),
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=max(shape.num_kv_heads for shape in shapes),
            head_dim=max(shape.head_dim for shape in shapes),
            layer_shapes=shapes,
            layer_inputs=config.layer_inputs,
            streams=config.streams,
            laurel_rank=config.laurel_rank,
            gate_cuts=config.gate_cuts or (None,) * config.num_layers,
            layer_scalars=config.has_layer_scalars,
            norm=config.norm,
            norm_eps=config.norm_eps,
            norm_bias=config.norm_bias,
            input_norms=names.attention_norm is not None,
            output_norms=names.attention_output_norm is not None,
            inner_norms=names.attention_inner_norm is not None,
            rounds_inputs=config.quantization is not None and config.quantization.is_ternary,
            is_parallel=config.is_parallel,
            parallel_norms=config.is_parallel and names.mlp_norm is not None,
            interleaved_qkv=config.interleaved_qkv,
            attention_scale=config.attention_scale or config.head_dim**-0.5,
            score_cap=config.score_cap,
            logit_cap=config.logit_cap,
            embedding_scale=embedding_scale,
            learned_positions=config.model_names.positions is not None,
            residual_scale=config.residual_scale,
            mlp_output_scale=config.mlp_output_scale,
            gate_scale=config.gate_scale,
            attention_output_scale=config.attention_output_scale,
            logits_scale=config.logits_scale,
            activation=_ACTIVATIONS[config.activation],
            experts=config.experts,
            convolutions=config.convolutions,
            latent=config.latent,
            delta_nets=config.delta_nets,
            mamba=config.mamba,
            sublayers=config.sublayers or (Sublayers.BOTH,) * config.num_layers,
            rotary=rotary(config.rope, config.max_context),
            local_rotary=None if local is None else rotary(local, config.max_context),
            layer_rotary=config.layer_rotary or (LayerRotary.MAIN,) * config.num_layers,
            wide_rotary=config.wide_rotary,
            max_context=config.max_context,
            windows=config.windows,
            chunked_windows=config.chunked_windows,
            query_scaling=config.query_scaling,
            is_bidirectional=config.is_bidirectional,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            mlp_bias=config.mlp_bias,
            gated_mlp=config.gated_mlp,
            head_bias=config.head_bias,
            head_norms=config.qk_norm or config.unit_qk_norm,
            joint_head_norms=config.joint_qk_norm,
            value_norms=config.unit_value_norm,
            late_head_norms=config.late_qk_norm,
            gated_attention=config.gated_attention,
            sinks=config.has_sinks,
            tied_head=config.tie_word_embeddings,
            rotary_axes=config.rotary_axes,
            takes_images=config.vision is not None,
            num_deep_rows=0 if config.vision is None else len(config.vision.deep_layers),
            whole_images=config.vision is not None and config.vision.is_whole,
            windowed_images=config.vision is not None and config.vision.is_whole_in_windows,
            source_len=config.source_len,
        )

    def scales_queries(self, layer: int) -> bool:
        """True if this layer's queries are multiplied by their positions."""
        return self.query_scaling is not None and self.query_scaling.layers[layer]

    def first_key(self, layer: int, position: int) -> int:
        """The first token that the one at this position sees, in a model that is not bidirectional."""
        window = self.windows[layer]
        if window is None:
            return 0
        return position - position % window if self.chunked_windows else max(0, position + 1 - window)

    def kv_places(self) -> tuple[KVPlace, ...]:
        """Of each layer's keys and values: of one that has none of its own those of the layer that has."""
        return self._places_in_pool()[0]

    def kv_layers(self) -> tuple[int, ...]:
        """(num_layers + 1,), of a model whose layers are alike: layer i has the pool's layers from number i up to the
        next one's.
        """
        places, (group, *_) = self._places_in_pool()
        return *(place.layer for place in places), group.num_layers

    def _places_in_pool(self) -> tuple[tuple[KVPlace, ...], tuple[KVLayers, ...]]:
        """The same, and the groups that the pool has then.

        A convolution keeps each token's inputs where others have keys and values, in as many layers as they fill. A
        layer that does not attend has none.
        """
        token_size = 2 * self.num_kv_heads * self.head_dim
        convolves = (False,) * self.num_layers if self.convolutions is None else self.convolutions.layers
        is_parallel = self.mamba is not None and self.mamba.is_parallel
        of_states = self._state_sizes()
        counts: dict[tuple[int, int], int] = {}  # of layers, by their heads
        places: list[KVPlace] = []
        for layer, shape in enumerate(self.layer_shapes):
            if shape.keys_of != layer:
                places.append(places[shape.keys_of])
                continue
            heads = (shape.num_kv_heads, shape.head_dim)
            before = counts.setdefault(heads, 0)
            places.append(KVPlace(list(counts).index(heads), before))
            size = -(-self.hidden_size // token_size) if convolves[layer] else 1
            is_empty = self.sublayers[layer] is Sublayers.MLP or (of_states[layer] > 0 and not is_parallel)
            counts[heads] += 0 if is_empty else size
        return tuple(places), tuple(KVLayers(count, *heads) for heads, count in counts.items())

    def state_layers(self) -> tuple[int, ...]:
        """(num_layers + 1,): layer i has the numbers of a sequence's state from this one up to the next one's."""
        return tuple(accumulate(self._state_sizes(), initial=0))

    def _state_sizes(self) -> list[int]:
        """Of each layer; 0: it has no state."""
        sizes = [0] * self.num_layers
        if self.delta_nets is not None:
            sizes = [self.delta_nets.state_size if each else 0 for each in self.delta_nets.layers]
        if self.mamba is not None:
            sizes = [self.mamba.layer_state_size if each else 0 for each in self.mamba.layers]
        return sizes

    def kv_shape(self, num_blocks: int, block_size: int, num_states: int | None = None) -> PoolShape:
        """The shape of a pool of this model's keys and values, and of states: by default as many as blocks."""
        (first, *others), state_size = self._places_in_pool()[1], self.state_layers()[-1]
        return PoolShape(
            *first,
            num_blocks,
            block_size,
            self.dtype,
            num_parts=2 if self.latent is None else 1,
            state_size=state_size,
            num_states=(num_blocks if num_states is None else num_states) if state_size else 0,
            others=tuple(others),
        )


def are_alike(shapes: tuple[LayerShape, ...]) -> bool:
    """True if all layers have the same sizes, and keys and values of their own."""
    own = [
        shape for layer, shape in enumerate(shapes) if shape.keys_of == layer and not shape.keys_are_values
    ]
    sizes = {(shape.num_kv_heads, shape.head_dim, shape.intermediate_size) for shape in shapes}
    return len(own) == len(shapes) and len(sizes) == 1


def rounded(number: float, dtype: DType) -> float:
    """The nearest number of this dtype."""
    wide = np.array([number], np.float32)
    return float(to_float32(from_float32(wide, dtype), dtype)[0])


class DenseSpec(Struct, frozen=True):
    """activation(x @ weight.T + bias) of embeddings, in fp32."""

    num_out: int
    activation: Activation | None


class EncoderSpec(Struct, frozen=True):
    """An encoder whose layers are x = norm(x + attention(x)), then norm(x + mlp(x)); or, with
    `pre_norm`, x + attention(norm(x)), then x + mlp(norm(x)), where the first layer's attention
    takes x itself if there is an `embedding_norm`.

    The first x is norm(word + type + position), or its projection. The MLP is down(activation(up(x))), or, `gated`,
    down(activation(gate(x)) · up(x)). The statistics of norms are fp32. Each token
    sees the tokens of its own text that are in its layer's window. Position p of a text takes row
    position_offset + p of their table. What turns queries and keys is computed in fp32, and rounded
    once.
    """

    dtype: DType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm: Norm  # of all norms; LAYER of encoders of texts
    norm_eps: float
    attention_scale: float
    activation: Activation
    gated: bool
    pre_norm: bool
    embedding_size: int | None  # columns of the embeddings, where they are projected; None: hidden_size
    embedding_norm: bool  # False: the first x is word + type + position
    final_norm: bool  # of what the last layer makes
    norm_bias: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    max_positions: int  # rows of the position table; 0: there is none
    position_offset: int
    type_vocab_size: int  # 0: there is none
    windows: tuple[int | None, ...]  # a layer: how many tokens to each side a token sees; None: all
    rotary: Rotary | None  # of layers without a window; None: positions do not turn them
    local_rotary: Rotary | None  # of layers with a window
    position_bias: PositionBias | None
    disentangled: Disentangled | None
    pooling: Pooling  # of a classifier, what its head sees
    dense: tuple[DenseSpec, ...]  # what embeddings pass through then
    normalize: bool  # embeddings to unit length, at last
    num_labels: int  # of a classifier: its rows are scores(norm(activation(dense(pooled)))); 0: embeddings
    head_activation: Activation
    head_bias: bool  # of a classifier's dense layer
    head_norm: bool  # whether a classifier's head has one
    output_norms: bool = False  # with `pre_norm`: of what attention and the MLP add
    head_norms: bool = False  # heads are normalised before they turn, values without weights
    turned_parts: int = 1  # equal parts of a head's turned numbers, which turn by themselves
    is_bounded: bool = False  # inputs and outputs of each product of a layer are clipped

    @classmethod
    def of(cls, config: EncoderConfig, dtype: DType) -> EncoderSpec:
        head_dim = config.hidden_size // config.num_heads
        # Of content, and with disentangled positions of both kinds of them: three terms.
        num_terms = 1 if config.disentangled is None else 3
        return cls(
            dtype=dtype,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            head_dim=head_dim,
            norm=Norm.LAYER,
            norm_eps=config.norm_eps,
            attention_scale=(num_terms * head_dim) ** -0.5,
            activation=_ACTIVATIONS[config.activation],
            gated=config.is_gated,
            pre_norm=config.has_pre_norm,
            embedding_size=config.embedding_size,
            embedding_norm=bool(config.names.norm),
            final_norm=bool(config.names.final_norm),
            norm_bias=config.has_norm_bias,
            qkv_bias=config.has_qkv_bias,
            output_bias=config.has_output_bias,
            mlp_bias=config.has_mlp_bias,
            max_positions=config.max_positions,
            position_offset=config.position_offset,
            type_vocab_size=config.type_vocab_size,
            windows=config.windows or (None,) * config.num_layers,
            rotary=Rotary.whole(config.rope_theta, head_dim),
            local_rotary=Rotary.whole(config.local_rope_theta, head_dim),
            position_bias=config.position_bias,
            disentangled=config.disentangled,
            pooling=Pooling(config.pooling),
            dense=tuple(DenseSpec(layer.num_out, activation_of(layer.activation)) for layer in config.dense),
            normalize=config.normalize,
            num_labels=len(config.labels),
            head_activation=_ACTIVATIONS[config.head_activation],
            head_bias=config.has_head_bias,
            head_norm=config.has_head_norm,
        )

    @property
    def num_columns(self) -> int:
        """The columns of the output, which has a row for each text."""
        if self.num_labels:
            return self.num_labels
        return self.dense[-1].num_out if self.dense else self.hidden_size
