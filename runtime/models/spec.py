"""A model as a value: everything that an executor needs to know of it beyond its weights.

A `DecoderSpec` or `EncoderSpec` is made from a checked config.json, and nothing that changes the result is anywhere
else. An executor lists every field that it implements, and refuses a spec with a field or a value that it does not know
(`executor.refusal_of`): so a new field here is refused everywhere until each executor has learnt it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..dtypes import DType
from .config import DecoderConfig, EncoderConfig
from .rotary import Rotary


class Activation(enum.StrEnum):
    """Functions of one number. `config.ACTIVATIONS` has the names that config.json files use."""

    SILU = "silu"  # x / (1 + exp(-x))
    GELU = "gelu"  # x · Φ(x), by the error function
    GELU_TANH = "gelu_tanh"  # its approximation by a tanh
    RELU = "relu"


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


class Pooling(enum.StrEnum):
    """How the states of a text's tokens become one row."""

    MEAN = "mean"
    CLS = "cls"  # the first token's


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder whose layers are x + attention(norm(x)), then x + down(activation(gate(y)) · up(y)) of y = norm(x).

    Norms are RMS norms: x / sqrt(mean(x²) + eps), rounded to `dtype`, times the weight. Keys and values are what the
    rotation (of keys) and the projections give, in `dtype`. A token sees itself and what came before it.
    """

    dtype: DType  # of activations, keys and values: BF16, F16 or F32; sums are in fp32
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # a multiple of num_kv_heads
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float  # scores are query · key times this
    activation: Activation
    rotary: Rotary
    max_context: int  # tokens of prompt and answer together
    windows: tuple[int | None, ...]  # a layer: how many tokens back a token sees, itself included; None: all
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool  # of gate, up and down
    head_norms: (
        bool  # each query head and key head is normalised before it is turned; the weight is (head_dim,)
    )
    tied_head: bool  # the head's matrix is the embeddings'

    @classmethod
    def of(cls, config: DecoderConfig, dtype: DType) -> DecoderSpec:
        return cls(
            dtype=dtype,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
            activation=_ACTIVATIONS[config.activation],
            rotary=Rotary.of(config.rope, config.max_context),
            max_context=config.max_context,
            windows=config.windows,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            mlp_bias=config.mlp_bias,
            head_norms=config.qk_norm,
            tied_head=config.tie_word_embeddings,
        )


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder whose layers are x = norm(x + attention(x)), then norm(x + down(activation(up(x)))).

    The first x is norm(word + position + type 0). Norms are LayerNorms, whose statistics are fp32; all projections have
    biases; each token sees all tokens of its own text. Position p of a text takes row position_offset + p.
    """

    dtype: DType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    activation: Activation
    max_positions: int  # rows of the position table
    type_vocab_size: int
    position_offset: int
    pooling: Pooling  # not of a classifier, which takes the first token's state
    normalize: bool  # embeddings to unit length; not of a classifier
    num_labels: int  # of a classifier: its rows are scores(tanh(dense(first token's state))); 0: embeddings

    @classmethod
    def of(cls, config: EncoderConfig, dtype: DType) -> EncoderSpec:
        head_dim = config.hidden_size // config.num_heads
        return cls(
            dtype=dtype,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            head_dim=head_dim,
            norm_eps=config.norm_eps,
            attention_scale=head_dim**-0.5,
            activation=_ACTIVATIONS[config.activation],
            max_positions=config.max_positions,
            type_vocab_size=config.type_vocab_size,
            position_offset=config.position_offset,
            pooling=Pooling(config.pooling),
            normalize=config.normalize,
            num_labels=len(config.labels),
        )

    @property
    def num_columns(self) -> int:
        """Of what comes out: a row for each text."""
        return self.num_labels or self.hidden_size
