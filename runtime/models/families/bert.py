"""BERT, RoBERTa and XLM-RoBERTa: positions from a table, norms after attention and MLP."""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import EncoderConfig, EncoderNames, offset_positions, read_common
from ..fields import Fields
from ..rope_config import MAX_POSITIONS

_BERT = EncoderNames(roots=("", "bert."), dense="bert.pooler.dense", scores="classifier")
_ROBERTA = EncoderNames(roots=("", "roberta."))


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_bert = family == "bert"
    common = read_common(config, family, _BERT if is_bert else _ROBERTA)
    common = replace(
        common, type_vocab_size=config.integer("type_vocab_size", low=1, high=1 << 16, default=2)
    )
    if is_bert:
        return common
    # Positions count from the one after the padding token's id.
    return offset_positions(common, 1 + config.integer("pad_token_id", low=0, high=MAX_POSITIONS, default=1))
