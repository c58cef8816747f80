"""A toy family of decoders: Mistral with a window in every other layer, and norms by other names.

All that a family needs is this file and its row.
"""

from __future__ import annotations

from msgspec.structs import replace

from teneral.runtime.models.decoder_config import DecoderConfig, LayerNames, read_common
from teneral.runtime.models.fields import Fields

ROW = {"toy": (__name__, "ToyForCausalLM")}
# The tensor of a toy, and Mistral's.
RENAMED = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family)
    window = config.integer("toy_window", low=1, high=1 << 16)
    return replace(
        common,
        windows=tuple(window if index % 2 else None for index in range(common.num_layers)),
        names=LayerNames(attention_norm="before_attention", mlp_norm="before_mlp"),
    )
