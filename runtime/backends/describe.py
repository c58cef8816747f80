"""A description of a model from its config.json alone: its family, the backends that compute it, and
what can be done with its weights.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import ModelError
from ..kv.storage import FloatBlocks, Int8Blocks
from ..models.adapter import AdapterPlace, modules_of
from ..models.decoder_config import DecoderConfig, is_pooled
from ..models.encoder_config import EncoderConfig, is_encoder
from ..models.executor import native_alone, refusal_of
from ..models.spec import DecoderSpec, EncoderSpec
from ..tensors import DType
from .cuda.implemented import refusal_of_spec as kernels_refusal_of
from .native.encoder import IMPLEMENTED as ENCODERS_IMPLEMENTED
from .native.implemented import NAME, refusal_of_spec

_ENCODERS_ON_A_GPU = "a device's kernels compute no encoders"


def describe_model(config_json: bytes) -> dict[str, Any]:
    """A JSON-ready value: `family`, `kind`, `max_tokens`; `native_refuses` and `kernels_refuse`, the
    reasons or null, in place of which torch computes, unless `native_only`; `quantizes`, true if
    `pack --quantize` takes the model and its GPTQ and AWQ checkpoints are read; `adapts`, what LoRA
    adapters may change: "attention" and "MLP"; `kv_bytes_per_token`, of keys and values in bf16 and in
    int8, null for an encoder.

    Or `refused`, the reason why the runtime does not support the model. Imports no torch, and raises
    nothing for any content of the file.
    """
    try:
        config = json.loads(config_json)
        if is_encoder(config):
            return _of_encoder(EncoderConfig.from_json(config))
        described = _of_decoder(DecoderConfig.from_json(config))
        return described | {"kind": "encoder", "adapts": []} if is_pooled(config) else described
    except (ModelError, ValueError, RecursionError) as error:
        return {"refused": str(getattr(error, "message", error))}


def _of_encoder(config: EncoderConfig) -> dict[str, Any]:
    spec = EncoderSpec.of(config, DType.F32)
    return {
        "refused": None,
        "family": config.family,
        "kind": "encoder",
        "max_tokens": config.max_tokens,
        "native_refuses": refusal_of(spec, ENCODERS_IMPLEMENTED, NAME),
        "native_only": False,
        "kernels_refuse": _ENCODERS_ON_A_GPU,
        "quantizes": False,
        "adapts": [],
        "kv_bytes_per_token": None,
    }


def _of_decoder(config: DecoderConfig) -> dict[str, Any]:
    spec = DecoderSpec.of(config, DType.BF16)
    token = spec.kv_shape(num_blocks=1, block_size=1)
    places = {module.place for layer in range(config.num_layers) for module in modules_of(config, layer)}
    return {
        "refused": None,
        "family": config.family,
        "kind": "decoder",
        "max_tokens": config.max_context,
        "native_refuses": refusal_of_spec(spec),
        "native_only": native_alone(spec) is not None,
        "kernels_refuse": kernels_refusal_of(spec),
        "quantizes": not config.names.stacked_alternating,
        "adapts": [
            name
            for name, place in (("attention", AdapterPlace.OUTPUT), ("MLP", AdapterPlace.DOWN))
            if place in places
        ],
        "kv_bytes_per_token": {"bf16": FloatBlocks.block_bytes(token), "int8": Int8Blocks.block_bytes(token)},
    }
