"""Qwen3.5's delta nets and gated attention: transformers' logits, in chunks and company bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.vision_models import tiny_vision_model

from teneral.loader.native.library import library
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import DecoderConfig

ODD: dict[str, Any] = {
    "linear_value_head_dim": 12,
    "linear_key_head_dim": 20,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5, odd sizes": ("qwen3_5_text", ODD),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_5_moe, stacked experts": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, odd sizes, a plain layer": (
        "qwen3_next",
        {**ODD, "linear_num_value_heads": 6, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
}
needs_core = pytest.mark.skipif(library() is None, reason="delta nets are the native core's")


@needs_core
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    oracle = tiny_model(family, **overrides)
    tensors = oracle.state_dict() if "stacked" in variant else tensors_of(oracle)
    decoder: Any = build_model(config_json(oracle), DictWeights(tensors), backends=[NativeBackend()])
    long, short = prompt_of(75), prompt_of(7, seed=1)

    whole = Stepper(decoder).step({"a": long, "b": short})
    stepper = Stepper(decoder)
    chunks = [
        stepper.step({"a": long[begin:end], f"b{end}": short})["a"]
        for begin, end in ((0, 1), (1, 3), (3, 43), (43, 44), (44, 75))
    ]

    torch.testing.assert_close(whole["a"], oracle_logits(oracle, long), atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(whole["b"], oracle_logits(oracle, short), atol=3e-4, rtol=1e-4)
    assert torch.equal(torch.cat(chunks), whole["a"])
    tokens = Stepper(decoder).greedy({"a": short}, 6)["a"]
    assert tokens == oracle_behind(oracle, short, tokens)


@needs_core
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_that_also_sees_images_is_computed(family: str) -> None:
    oracle, short = tiny_vision_model(family), prompt_of(21)
    tensors = tensors_of(oracle) | {"mtp.norm.weight": torch.ones(64)}
    decoder: Any = build_model(config_json(oracle), DictWeights(tensors), backends=[NativeBackend()])

    torch.testing.assert_close(
        Stepper(decoder).step({"a": short})["a"], oracle_logits(oracle, short), atol=3e-4, rtol=1e-4
    )


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_other_backends_refuse_them_by_name(backend: Any) -> None:
    oracle = tiny_model("qwen3_5_text")
    with pytest.raises(ModelError, match="delta_nets"):
        build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["full_attention", "mamba", "mamba"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 257}, "linear_key_head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], named: str) -> None:
    config = config_json(tiny_model("qwen3_5_text"))
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json({**config, **changed})
