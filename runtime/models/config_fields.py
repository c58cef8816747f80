"""Fields of config.json that decoders and encoders state in the same way: the family, the sizes, the activation."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ModelError
from .fields import Fields

# What each architecture means by an activation's name; `backends/torch/layers.py` computes them.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu")

MAX_LAYERS = 1_024
MAX_WIDTH = 1 << 20  # of hidden and intermediate states
MAX_HEADS = 4_096
MAX_HEAD_DIM = 1_024
MAX_EXPERTS = 1_024
MAX_VOCABULARY = 1 << 24


_OTHERS = "--backend transformers serves others that an installed transformers knows, slowly."


def family_of(config: Fields, families: Mapping[str, tuple[str, ...]]) -> str:
    """The model's family, by `model_type` or else `architectures`; where both are there, they must agree."""
    supported = [name for names in families.values() for name in names]
    hint = f"Supported architectures: {', '.join(supported)}. {_OTHERS}"
    architectures = config.texts("architectures") or []
    if "model_type" in config:
        family = str(config.get("model_type"))
        if family not in families:
            raise config.wrong(
                "model_type",
                "which is not supported",
                hint=f"Supported: {', '.join(sorted(families))}. {_OTHERS}",
            )
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


def shape_of(config: Fields) -> dict[str, int]:
    """The sizes that every family has."""
    return {
        "vocab_size": config.integer("vocab_size", low=1, high=MAX_VOCABULARY),
        "hidden_size": config.integer("hidden_size", low=1, high=MAX_WIDTH),
        "intermediate_size": config.integer("intermediate_size", low=1, high=MAX_WIDTH),
        "num_layers": config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        "num_heads": config.integer("num_attention_heads", low=1, high=MAX_HEADS),
    }
