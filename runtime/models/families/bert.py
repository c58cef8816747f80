"""BERT, ELECTRA, RoBERTa, XLM-RoBERTa and CamemBERT: positions from a table, norms after attention and MLP; in XL
before them.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import EncoderConfig, EncoderNames, offset_positions, read_common
from ..fields import MAX_WIDTH, Fields
from ..rope_config import MAX_POSITIONS

_BERT = EncoderNames(roots=("", "bert."), dense="bert.pooler.dense", scores="classifier")
_ELECTRA = EncoderNames(roots=("", "electra."), projection="embeddings_project")
_ROBERTA = EncoderNames(roots=("", "roberta."))
_ROBERTA_XL = EncoderNames(
    roots=("", "roberta."),
    norm="",
    attention_norm="attention.self_attn_layer_norm",
    mlp_norm="LayerNorm",
    final_norm="encoder.LayerNorm",
)
_NAMES = {"bert": _BERT, "electra": _ELECTRA, "xlm-roberta-xl": _ROBERTA_XL}


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, _NAMES.get(family, _ROBERTA))
    common = replace(
        common, type_vocab_size=config.integer("type_vocab_size", low=1, high=1 << 16, default=2)
    )
    if family == "bert":
        return common
    if family == "electra":
        # Missing, it is 128, as in transformers.
        size = config.integer("embedding_size", low=1, high=MAX_WIDTH, default=128)
        is_projected = size != common.hidden_size
        return replace(common, head_activation="gelu", embedding_size=size if is_projected else None)
    if family == "xlm-roberta-xl":
        norm_eps = config.number("layer_norm_eps", low=0.0, high=1.0, default=1e-5)
        common = replace(common, has_pre_norm=True, norm_eps=norm_eps)
    # Positions count from the one after the padding token's id.
    return offset_positions(common, 1 + config.integer("pad_token_id", low=0, high=MAX_POSITIONS, default=1))
