"""A model's config.json as validated values: `DecoderConfig` or `EncoderConfig`.

What is read is bounded and checked against itself, so that the model code can rely on it; whether the
tensors agree is checked when the model is built. Options that would change the result and are not
implemented are refused by name, never ignored. Nothing here imports torch: a file can be judged while
torch is still importing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from .fields import Fields
from .pooling_config import pooling_of
from .quantization_config import QuantizationConfig, compute_dtype
from .rope_config import MAX_POSITIONS, RopeConfig

# model_type → the architectures whose weights this code can run
DECODER_FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
}
ENCODER_FAMILIES: dict[str, tuple[str, ...]] = {
    "bert": ("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    "roberta": ("RobertaModel", "RobertaForMaskedLM"),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForMaskedLM"),
}
# Encoders with a head on top that gives a score for each label
CLASSIFIERS: dict[str, str] = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}

ENCODERS = {family: (*names, CLASSIFIERS[family]) for family, names in ENCODER_FAMILIES.items()}

# What each architecture means by an activation's name; `activations.py` computes them.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu")

MAX_LAYERS = 1_024
MAX_WIDTH = 1 << 20  # of hidden and intermediate states
MAX_HEADS = 4_096
MAX_HEAD_DIM = 1_024
MAX_VOCABULARY = 1 << 24
MAX_LABELS = 1 << 16


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family. Counts are at least 1; `num_kv_heads` divides `num_heads`."""

    family: str  # a key of DECODER_FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    max_context: int  # tokens of prompt and answer together
    rope: RopeConfig
    windows: tuple[int | None, ...]  # a layer: how many tokens back a token sees, itself included; None: all
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # queries and keys are normalised head by head
    tie_word_embeddings: bool
    quantization: QuantizationConfig | None
    dtype: str | None  # to compute in, where the model is quantised: embeddings do not always tell it

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        """Raises `ModelError` naming the key that is missing, wrong or not supported."""
        config = Fields(data)
        family = _family(config, DECODER_FAMILIES)
        quantization = QuantizationConfig.from_fields(config)
        shape = _shape(config)
        hidden_size, num_heads = shape["hidden_size"], shape["num_heads"]
        num_kv_heads = config.integer("num_key_value_heads", low=1, high=num_heads, default=num_heads)
        if num_heads % num_kv_heads:
            raise config.wrong("num_key_value_heads", f"but must divide num_attention_heads, {num_heads}")
        head_dim = config.optional_integer("head_dim", low=4, high=MAX_HEAD_DIM)
        if head_dim is None:
            head_dim = 128 if family == "qwen3" else _even_share(config, hidden_size, num_heads)
        max_positions = config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS)
        rope = RopeConfig.from_fields(config, head_dim=head_dim, max_positions=max_positions)
        attention_bias = family in ("llama", "qwen3") and config.boolean("attention_bias", default=False)
        return cls(
            family=family,
            **shape,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            activation=config.choice("hidden_act", ACTIVATIONS, default="silu"),
            norm_eps=config.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
            max_context=rope.max_context,
            rope=rope,
            windows=_windows(config, family, shape["num_layers"]),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and config.boolean("mlp_bias", default=False),
            qk_norm=family == "qwen3",
            tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
            quantization=quantization,
            dtype=compute_dtype(config) if quantization is not None else None,
        )


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A BERT-type encoder, and how its token states become one embedding."""

    family: str  # a key of ENCODER_FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    max_positions: int  # rows of the position table
    type_vocab_size: int
    position_offset: int  # the row of the position table that a text's first token takes
    max_tokens: int  # of one text, special tokens included
    pooling: str  # "mean" or "cls"
    normalize: bool  # to unit length
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its scores; others have none

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        *,
        modules: Any = None,
        pooling: Any = None,
        sentence_bert: Any = None,
    ) -> EncoderConfig:
        """`modules`, `pooling` and `sentence_bert` are what modules.json, 1_Pooling/config.json and
        sentence_bert_config.json hold. Without the first, embeddings are means and normalised.
        Raises `ModelError` naming the key that is missing, wrong or not supported."""
        config = Fields(data)
        family = _family(config, ENCODERS)
        _refuse_quantised(config)
        for key in ("is_decoder", "add_cross_attention"):
            if config.boolean(key, default=False):
                raise config.wrong(key, "but only encoders of this family are supported")
        config.choice("position_embedding_type", ("absolute",), default="absolute")
        shape = _shape(config)
        if shape["hidden_size"] % shape["num_heads"]:
            raise config.wrong(
                "hidden_size", f"but must be a multiple of num_attention_heads, {shape['num_heads']}"
            )
        max_positions = config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS, default=512)
        offset = 0
        if family != "bert":  # RoBERTa's positions count from the one after the padding token's id
            offset = 1 + config.integer("pad_token_id", low=0, high=MAX_POSITIONS, default=1)
        if offset >= max_positions:
            raise config.wrong("max_position_embeddings", f"but positions begin at {offset}")
        limits = Fields({} if sentence_bert is None else sentence_bert, file="sentence_bert_config.json")
        stated_tokens = limits.optional_integer("max_seq_length", low=1, high=MAX_POSITIONS)
        mode, normalize = pooling_of(modules, pooling)
        return cls(
            family=family,
            **shape,
            activation=config.choice("hidden_act", ACTIVATIONS, default="gelu"),
            norm_eps=config.number("layer_norm_eps", low=0.0, high=1.0, default=1e-12),
            max_positions=max_positions,
            type_vocab_size=config.integer("type_vocab_size", low=1, high=1 << 16, default=2),
            position_offset=offset,
            max_tokens=min(max_positions - offset, stated_tokens or MAX_POSITIONS),
            pooling=mode,
            normalize=normalize,
            labels=_labels(config) if CLASSIFIERS[family] in (config.texts("architectures") or ()) else (),
        )


def is_encoder(data: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an encoder. Raises `ModelError` for families not supported."""
    return _family(Fields(data), DECODER_FAMILIES | ENCODERS) in ENCODERS


def _family(config: Fields, families: Mapping[str, tuple[str, ...]]) -> str:
    """The model's family, by `model_type` or else `architectures`; where both are there, they must agree."""
    supported = [name for names in families.values() for name in names]
    hint = f"Supported architectures: {', '.join(supported)}."
    architectures = config.texts("architectures") or []
    if "model_type" in config:
        family = config.choice("model_type", families)
    else:
        family = next((key for key, names in families.items() if set(names) & set(architectures)), "")
    if not family:
        raise config.wrong("architectures", "which is not supported", hint=hint)
    if architectures and not set(families[family]) & set(architectures):
        raise ModelError(
            f"config.json: architecture {architectures[0][:80]!r} of model_type {family!r} is not supported",
            hint=hint,
        )
    return family


def _labels(config: Fields) -> tuple[str, ...]:
    """Of `id2label`, which is left out where there are the two that transformers calls LABEL_0 and LABEL_1."""
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(2))
    if not isinstance(names, Mapping) or not 0 < len(names) <= MAX_LABELS:
        raise config.wrong("id2label", f"but must have 1 to {MAX_LABELS} labels")
    labels = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(label, str) for label in labels):
        raise config.wrong("id2label", f'but must have a name for each of "0" to "{len(names) - 1}"')
    return tuple(str(label) for label in labels)


def _refuse_quantised(config: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        if key in config:
            raise ModelError(
                f"config.json has a {key}: quantised encoders are not supported",
                hint="Use the model's bf16, fp16 or fp32 weights.",
            )


def _shape(config: Fields) -> dict[str, int]:
    """The sizes that every family has."""
    return {
        "vocab_size": config.integer("vocab_size", low=1, high=MAX_VOCABULARY),
        "hidden_size": config.integer("hidden_size", low=1, high=MAX_WIDTH),
        "intermediate_size": config.integer("intermediate_size", low=1, high=MAX_WIDTH),
        "num_layers": config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        "num_heads": config.integer("num_attention_heads", low=1, high=MAX_HEADS),
    }


def _even_share(config: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim, rest = divmod(hidden_size, num_heads)
    if rest or not 4 <= head_dim <= MAX_HEAD_DIM:
        raise config.wrong(
            "hidden_size",
            f"but without a head_dim it must be num_attention_heads, {num_heads}, times 4 to {MAX_HEAD_DIM}",
        )
    return head_dim


def _windows(config: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """How far back each layer sees. Defaults are those of transformers, which leaves them out of the file."""
    if family == "llama":
        return (None,) * num_layers
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else 4_096
    first_windowed = 0
    if family != "mistral":
        first_windowed = config.integer("max_window_layers", low=0, high=1 << 16, default=28)
        if not config.boolean("use_sliding_window", default=False):
            window = None

    kinds = config.texts("layer_types")
    if kinds is None:
        return tuple(window if index >= first_windowed else None for index in range(num_layers))
    if len(kinds) < num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.wrong(
            "layer_types", f"but must say full_attention or sliding_attention for each of {num_layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise config.wrong("layer_types", "but there is no sliding_window (or use_sliding_window is not set)")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])
