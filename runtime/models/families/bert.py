"""BERT, ELECTRA, RoBERTa, XLM-RoBERTa and CamemBERT: positions from a table, norms after attention and MLP."""

from __future__ import annotations

from msgspec.structs import replace

from ...errors import ModelError
from ..encoder_config import EncoderConfig, EncoderNames, offset_positions, read_common
from ..fields import MAX_WIDTH, Fields
from ..rope_config import MAX_POSITIONS

_BERT = EncoderNames(roots=("", "bert."), dense="bert.pooler.dense", scores="classifier")
_ELECTRA = EncoderNames(roots=("", "electra."))
_ROBERTA = EncoderNames(roots=("", "roberta."))


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, {"bert": _BERT, "electra": _ELECTRA}.get(family, _ROBERTA))
    common = replace(
        common, type_vocab_size=config.integer("type_vocab_size", low=1, high=1 << 16, default=2)
    )
    if family == "bert":
        return common
    if family == "electra":
        # Missing, it is 128, as in transformers.
        size = config.integer("embedding_size", low=1, high=MAX_WIDTH, default=128)
        if size != common.hidden_size:
            raise ModelError(
                f"config.json: embedding_size is {size}, but only hidden_size, {common.hidden_size}, is supported"
            )
        return replace(common, head_activation="gelu")
    # Positions count from the one after the padding token's id.
    return offset_positions(common, 1 + config.integer("pad_token_id", low=0, high=MAX_POSITIONS, default=1))
