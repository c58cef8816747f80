"""An encoder's config.json as validated values, and the table of the families that are read.

Each family is a module of `families/`, named here by string and imported when a model of it is
read: its `read` makes the `EncoderConfig` out of the fields. The files of sentence-transformers
come on top. What is read is bounded and checked against itself; options that would change the
result and are not implemented are refused by name, never ignored. Nothing here imports torch or
numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..errors import ModelError
from .decoder_config import decoder_architectures
from .fields import ACTIVATIONS, MAX_HEAD_DIM, QUANTIZATION_KEYS, Fields, family_of, shape_of
from .pooling_config import Dense, sentence_of
from .rope_config import MAX_POSITIONS

MAX_LABELS = 1 << 16
MAX_BUCKETS = 1 << 16


class EncoderFamily(Struct, frozen=True):
    """The module that reads a `model_type`, and the architectures whose weights this code can run."""

    module: str
    architectures: tuple[str, ...]
    classifier: str  # an encoder with a head on top that gives a score for each label


FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(
        "bert", ("BertModel", "BertForMaskedLM", "BertForPreTraining"), "BertForSequenceClassification"
    ),
    "roberta": EncoderFamily(
        "bert", ("RobertaModel", "RobertaForMaskedLM"), "RobertaForSequenceClassification"
    ),
    "xlm-roberta": EncoderFamily(
        "bert", ("XLMRobertaModel", "XLMRobertaForMaskedLM"), "XLMRobertaForSequenceClassification"
    ),
    "xlm-roberta-xl": EncoderFamily(
        "bert", ("XLMRobertaXLModel", "XLMRobertaXLForMaskedLM"), "XLMRobertaXLForSequenceClassification"
    ),
    "camembert": EncoderFamily(
        "bert", ("CamembertModel", "CamembertForMaskedLM"), "CamembertForSequenceClassification"
    ),
    "electra": EncoderFamily(
        "bert",
        ("ElectraModel", "ElectraForPreTraining", "ElectraForMaskedLM"),
        "ElectraForSequenceClassification",
    ),
    "albert": EncoderFamily(
        "albert",
        ("AlbertModel", "AlbertForPreTraining", "AlbertForMaskedLM"),
        "AlbertForSequenceClassification",
    ),
    "distilbert": EncoderFamily(
        "distilbert", ("DistilBertModel", "DistilBertForMaskedLM"), "DistilBertForSequenceClassification"
    ),
    "mpnet": EncoderFamily("mpnet", ("MPNetModel", "MPNetForMaskedLM"), "MPNetForSequenceClassification"),
    "modernbert": EncoderFamily(
        "modernbert", ("ModernBertModel", "ModernBertForMaskedLM"), "ModernBertForSequenceClassification"
    ),
    "nomic_bert": EncoderFamily(
        "nomic_bert",
        ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"),
        "NomicBertForSequenceClassification",
    ),
    "deberta": EncoderFamily(
        "deberta", ("DebertaModel", "DebertaForMaskedLM"), "DebertaForSequenceClassification"
    ),
    "deberta-v2": EncoderFamily(
        "deberta", ("DebertaV2Model", "DebertaV2ForMaskedLM"), "DebertaV2ForSequenceClassification"
    ),
}
ENCODERS = {name: (*family.architectures, family.classifier) for name, family in FAMILIES.items()}


class EncoderNames(Struct, frozen=True):
    """An encoder's tensors in a checkpoint, without ".weight" and ".bias". Defaults are those of BERT.

    Several names of one projection are stacked in their order; one name is a matrix of all of them.
    """

    roots: tuple[str, ...]  # what may stand before them all; the first that fits counts
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"  # "": embeddings are not normalised
    projection: str = ""  # of embeddings to hidden_size
    relative: str = ""  # the table of a position bias, or of disentangled positions
    relative_norm: str = ""
    layer: str = "encoder.layer.{}."  # the prefix of a layer
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    position_qk: tuple[
        str, ...
    ] = ()  # queries and keys of disentangled positions; (): the same as of content
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)  # of a gated MLP: gate, then up
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    dense: str = "classifier.dense"  # of a classifier's head: without a root
    head_norm: str = ""
    scores: str = "classifier.out_proj"


class PositionBias(Struct, frozen=True):
    """A number for each head and each distance of two tokens, in buckets, that is added to their scaled score.

    Half of the buckets are for keys behind the query. Of each half, the first half has a bucket a distance, and the
    others grow by powers up to `max_distance` (T5, arXiv 1910.10683, section 2.1).
    """

    num_buckets: int  # a multiple of 4
    max_distance: int


class Disentangled(Struct, frozen=True):
    """Scores of content with position and of position with content (DeBERTa, arXiv 2006.03654, equation 4).

    A distance has a bucket in [0, 2 · span). Within span / 2 each has its own; where `max_distance` is given those
    beyond share buckets that grow by powers up to it.
    """

    span: int
    max_distance: int | None


class EncoderConfig(Struct, frozen=True):
    """An encoder, and how its token states become one embedding or a row of scores. Defaults are those of BERT."""

    family: str  # a key of FAMILIES
    names: EncoderNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # divides hidden_size
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    max_tokens: int  # of one text, special tokens included
    # Columns of the embeddings and their norm, which a projection makes hidden_size; None: hidden_size, as they are.
    embedding_size: int | None = None
    num_layer_groups: int = 0  # equal runs of layers that share their weights; 0: each has its own
    max_positions: int = 0  # rows of the position table; 0: there is none
    position_offset: int = 0  # the row of the position table that a text's first token takes
    type_vocab_size: int = 0  # rows of the table of token types; 0: there is none
    is_gated: bool = False  # the MLP is down(activation(gate) · up)
    # Norms are before attention and MLP; the first layer's attention has none where embeddings have one.
    has_pre_norm: bool = False
    has_norm_bias: bool = True
    has_qkv_bias: bool = True
    # Each head's query, key and value lie one behind another, and queries and values have biases of their own.
    has_interleaved_qkv: bool = False
    has_output_bias: bool = True
    has_mlp_bias: bool = True
    windows: tuple[
        int | None, ...
    ] = ()  # a layer: how many tokens to each side a token sees; None, or (): all
    rope_theta: float | None = None  # None: positions do not turn queries and keys
    local_rope_theta: float | None = None  # likewise, in layers with a window
    position_bias: PositionBias | None = None
    disentangled: Disentangled | None = None
    head_activation: str = "tanh"  # of a classifier: one of ACTIVATIONS, or tanh
    has_head_bias: bool = True  # of its dense layer
    has_head_norm: bool = False
    pooling: str = "mean"  # one of POOLING_MODES; of a classifier, what its head sees
    dense: tuple[Dense, ...] = ()  # what embeddings pass through after they are pooled
    normalize: bool = True  # to unit length
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its scores; others have none

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        *,
        modules: Any = None,
        pooling: Any = None,
        sentence_bert: Any = None,
        dense: Mapping[str, Any] | None = None,
    ) -> EncoderConfig:
        """`modules`, `pooling` and `sentence_bert` are what modules.json, 1_Pooling/config.json and
        sentence_bert_config.json hold, `dense` what the config.json of each folder with a Dense module does. Without
        the first, embeddings are means and normalised.
        Raises `ModelError` naming the key that is missing, wrong or not supported.
        """
        fields = Fields(data)
        name = family_of(fields, ENCODERS)
        _refuse_quantised(fields)
        family = FAMILIES[name]
        config: EncoderConfig = import_module(f".families.{family.module}", __package__).read(fields, name)
        if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads > MAX_HEAD_DIM:
            raise ModelError(
                f"config.json: hidden_size is {config.hidden_size}, but must be a multiple of the number of heads, "
                f"{config.num_heads}, and at most {MAX_HEAD_DIM} times as much",
            )
        limits = Fields({} if sentence_bert is None else sentence_bert, file="sentence_bert_config.json")
        stated_tokens = limits.optional_integer("max_seq_length", low=1, high=MAX_POSITIONS)
        config = replace(config, max_tokens=min(config.max_tokens, stated_tokens or MAX_POSITIONS))
        if family.classifier in (fields.texts("architectures") or ()):
            return replace(config, labels=labels_of(fields))
        sentence = sentence_of(modules, pooling, dense or {}, config.hidden_size)
        return replace(config, pooling=sentence.pooling, dense=sentence.dense, normalize=sentence.normalize)


def read_common(fields: Fields, family: str, names: EncoderNames) -> EncoderConfig:
    """The fields that most families state as BERT does. Raises `ModelError` for those that ask for a decoder."""
    for key in ("is_decoder", "add_cross_attention"):
        if fields.boolean(key, default=False):
            raise fields.wrong(key, "but only encoders of this family are supported")
    fields.choice("position_embedding_type", ("absolute",), default="absolute")
    max_positions = fields.integer("max_position_embeddings", low=1, high=MAX_POSITIONS, default=512)
    shape = shape_of(fields)
    return EncoderConfig(
        family=family,
        names=names,
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        activation=fields.choice("hidden_act", ACTIVATIONS, default="gelu"),
        norm_eps=fields.number("layer_norm_eps", low=0.0, high=1.0, default=1e-12),
        max_tokens=max_positions,
        max_positions=max_positions,
        pooling="cls",
    )


def offset_positions(config: EncoderConfig, offset: int) -> EncoderConfig:
    """With positions that count from row `offset` of their table. Raises `ModelError` where that leaves none."""
    if offset >= config.max_positions:
        raise ModelError(
            f"config.json: max_position_embeddings is {config.max_positions}, but positions begin at {offset}"
        )
    return replace(config, position_offset=offset, max_tokens=config.max_positions - offset)


def refuse_unless(fields: Fields, **allowed: Any) -> None:
    """Raises `ModelError` for a key that is there with any other value."""
    for key, value in allowed.items():
        if key in fields and fields.get(key) != value:
            raise fields.wrong(key, f"but {value!r} is all that is supported")


def labels_of(config: Fields) -> tuple[str, ...]:
    """Those of `id2label`, which is left out where there are the two that transformers calls LABEL_0 and LABEL_1."""
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
    for key in QUANTIZATION_KEYS:
        if key in config:
            raise ModelError(
                f"config.json has a {key}: quantised encoders are not supported",
                hint="Use the model's bf16, fp16 or fp32 weights.",
            )


def is_encoder(data: Mapping[str, Any]) -> bool:
    """True if a config.json describes an encoder. Raises `ModelError` for families not supported."""
    return family_of(Fields(data), decoder_architectures() | ENCODERS) in ENCODERS
