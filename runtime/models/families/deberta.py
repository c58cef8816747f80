"""DeBERTa: attention scores of content and position, by the distance of two tokens, of v2 and v3 in buckets.

The first version has projections of positions of their own, and stores each head's queries, keys and values one behind
another.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import (
    MAX_BUCKETS,
    Disentangled,
    EncoderConfig,
    EncoderNames,
    read_common,
    refuse_unless,
)
from ..fields import ACTIVATIONS, Fields

_NAMES = EncoderNames(
    roots=("", "deberta."),
    relative="encoder.rel_embeddings",
    relative_norm="encoder.LayerNorm",
    qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    dense="pooler.dense",
    scores="classifier",
)
_FIRST_NAMES = replace(
    _NAMES,
    qkv=("attention.self.in_proj",),
    position_qk=("attention.self.pos_q_proj", "attention.self.pos_proj"),
    relative_norm="",
)


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_first = family == "deberta"
    common = read_common(config, family, _FIRST_NAMES if is_first else _NAMES)
    kinds = config.get("pos_att_type")
    if isinstance(kinds, str):
        kinds = [kind.strip() for kind in kinds.lower().split("|")]
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise config.wrong("pos_att_type", 'but ["p2c", "c2p"] is all that is supported')
    for key in ("relative_attention", *(() if is_first else ("share_att_key",))):
        if not config.boolean(key, default=False):
            raise config.wrong(key, "but true is all that is supported")
    refuse_unless(
        config,
        conv_kernel_size=0,
        embedding_size=common.hidden_size,
        attention_head_size=common.hidden_size // common.num_heads,
        pooler_hidden_size=common.hidden_size,
        talking_head=False,
    )
    norm = config.text("norm_rel_ebd") if "norm_rel_ebd" in config else "none"
    max_distance = config.integer("max_relative_positions", low=-1, high=MAX_BUCKETS, default=-1)
    if max_distance < 1:
        max_distance = min(common.max_positions, MAX_BUCKETS)
    num_buckets = -1 if is_first else config.integer("position_buckets", low=-1, high=MAX_BUCKETS, default=-1)
    has_buckets = num_buckets > 0
    if has_buckets and not 4 <= num_buckets <= max_distance:
        raise config.wrong("position_buckets", f"but must be 4 to max_relative_positions, {max_distance}")
    names = common.names
    if "layer_norm" not in [part.strip() for part in norm.lower().split("|")]:
        names = replace(names, relative_norm="")
    has_positions = config.boolean("position_biased_input", default=True)
    return replace(
        common,
        names=names,
        max_positions=common.max_positions if has_positions else 0,
        type_vocab_size=config.integer("type_vocab_size", low=0, high=1 << 16, default=0),
        disentangled=Disentangled(
            span=num_buckets if has_buckets else max_distance,
            max_distance=max_distance if has_buckets else None,
        ),
        has_interleaved_qkv=is_first,
        head_activation=config.choice("pooler_hidden_act", ("tanh", *ACTIVATIONS), default="gelu"),
    )
