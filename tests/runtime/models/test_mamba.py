"""Mamba-2 layers of Granite 4, Bamba, Falcon-H1 and Nemotron-H: transformers' logits, in chunks and company bit for bit
the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_in_rows, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import DecoderConfig

GRANITE = "granitemoehybrid"
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "attention_bias": True,
}
WHOLE_INPUTS = {"attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (GRANITE, {}),
    "granite, stacked experts": (GRANITE, {}),
    "granite without experts": (GRANITE, {"num_local_experts": 0}),
    "granite, odd sizes": (GRANITE, ODD),
    "granite, with positions": (GRANITE, {"position_embedding_type": "rope"}),
    "granite, heads as published": (
        GRANITE,
        {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 128, "tie_word_embeddings": True},
    ),
    "bamba": ("bamba", {}),
    "bamba, odd sizes": ("bamba", {**ODD, "mlp_bias": True, "mamba_d_state": 256}),
    "falcon": ("falcon_h1", {}),
    "falcon, odd sizes, biases": (
        "falcon_h1",
        {
            **ODD,
            **WHOLE_INPUTS,
            "mamba_d_ssm": None,
            "projectors_bias": True,
            "mlp_bias": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron": ("nemotron_h", {}),
    "nemotron, odd sizes, biases": (
        "nemotron_h",
        {
            "hidden_size": 72,
            "layer_types": ["mlp", "linear_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_num_heads": 6,
            "n_groups": 3,
            "ssm_state_size": 20,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "nemotron, experts first": (
        "nemotron_h",
        {"layer_types": ["moe", "full_attention", "linear_attention"]},
    ),
}
needs_core = pytest.mark.skipif(library() is None, reason="Mamba-2 layers are the native core's")


@needs_core
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    oracle = tiny_model(family, **overrides)
    tensors = tensors_in_rows(oracle) if "stacked" in variant else tensors_of(oracle)
    decoder: Any = build_model(config_json(oracle), DictWeights(tensors), backends=[NativeBackend()])
    long, short = prompt_of(75), prompt_of(7, seed=1)

    whole = Stepper(decoder).step({"a": long, "b": short})
    stepper = Stepper(decoder)
    chunks = [
        stepper.step({"a": long[begin:end], f"b{end}": short})["a"]
        for begin, end in ((0, 1), (1, 3), (3, 43), (43, 44), (44, 75))
    ]

    torch.testing.assert_close(whole["a"], oracle_logits(oracle, long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole["b"], oracle_logits(oracle, short), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat(chunks), whole["a"])
    tokens = Stepper(decoder).greedy({"a": short}, 6)["a"]
    assert tokens == oracle_behind(oracle, short, tokens)


@needs_core
@pytest.mark.parametrize("family", [GRANITE, "bamba", "falcon_h1", "nemotron_h"])
def test_in_bf16_threads_chunks_and_company_change_no_bit(family: str) -> None:
    oracle = tiny_model(family, dtype=torch.bfloat16, mamba_n_groups=2)
    decoder: Any = build_model(
        config_json(oracle), DictWeights(tensors_of(oracle)), backends=[NativeBackend()]
    )
    own = library()
    assert own is not None
    prompt = prompt_of(75)
    expected = Stepper(decoder).step({"a": prompt})["a"]
    before = own.functions.tn_num_threads()
    try:
        for num_threads in (1, 3, 5):
            own.functions.tn_set_threads(num_threads)
            stepper, rows = Stepper(decoder), []
            for begin, end in ((0, 2), (2, 3), (3, 40), (40, 75)):
                others = {f"{end} {number}": prompt_of(5 + number, seed=number) for number in range(3)}
                rows.append(stepper.step({**others, "a": prompt[begin:end]})["a"])
            assert torch.equal(torch.cat(rows), expected)
    finally:
        own.functions.tn_set_threads(before)


@needs_core
def test_a_model_whose_layers_all_attend_has_no_states() -> None:
    """Granite 4.0 Micro: the family without its Mamba-2 layers, which every backend computes."""
    kinds = ["full_attention"] * 3
    oracle = tiny_model(GRANITE, layer_types=kinds, num_local_experts=0, position_embedding_type="rope")
    prompt = prompt_of(40)
    for backend in (NativeBackend(), TorchBackend(), ReferenceBackend()):
        made: Any = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])
        ours = Stepper(made).step({"a": prompt})["a"]
        torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)
        assert made.state_bytes == 0


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_other_backends_refuse_them_by_name(backend: Any) -> None:
    oracle = tiny_model("bamba")
    with pytest.raises(ModelError, match="mamba"):
        build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])


@pytest.mark.parametrize("kind", ["mamba", "linear_attention"])
def test_published_files_name_layers_and_positions_as_they_did(kind: str) -> None:
    config = config_json(tiny_model(GRANITE))
    kinds = [kind, "attention", kind]
    limits = [0.0, float("inf")]
    older = {**config, "layer_types": kinds, "position_embedding_type": "nope", "time_step_limit": limits}

    read = DecoderConfig.from_json({key: value for key, value in older.items() if key != "mamba_d_head"})

    assert read == DecoderConfig.from_json(config)


def test_nemotrons_older_files_have_a_letter_for_each_layer_and_another_prefix() -> None:
    oracle = tiny_model("nemotron_h")
    config, tensors = config_json(oracle), tensors_of(oracle)
    older = {key: value for key, value in config.items() if key != "layers_block_type"}
    older |= {"hybrid_override_pattern": "M*E-ME", "num_hidden_layers": 6}
    named = {name.replace("model.", "backbone."): tensor for name, tensor in tensors.items()}
    prompt = prompt_of(40)

    rows = [
        Stepper(build_model(each, DictWeights(weights), backends=[NativeBackend()])).step({"a": prompt})["a"]
        for each, weights in ((config, tensors), (older, named))
    ]

    assert DecoderConfig.from_json(older) == DecoderConfig.from_json(config)
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        (GRANITE, {"layer_types": ["mamba"] * 3}, "layer_types"),
        (GRANITE, {"layer_types": ["mamba", "attention", "moe"]}, "layer_types"),
        (GRANITE, {"layer_types": None}, "layer_types"),
        (GRANITE, {"mamba_d_conv": 17}, "mamba_d_conv"),
        (GRANITE, {"mamba_d_state": 260}, "mamba_d_state"),
        (GRANITE, {"mamba_d_state": 18}, "mamba_d_state"),
        (GRANITE, {"mamba_n_heads": 3}, "mamba_n_heads"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_groups"),
        (GRANITE, {"mamba_d_head": 31}, "mamba_n_heads"),
        (GRANITE, {"mamba_d_head": "large"}, "mamba_d_head"),
        (GRANITE, {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"hidden_act": "gelu"}, "hidden_act"),
        (GRANITE, {"shared_intermediate_size": -1}, "shared_intermediate_size"),
        (GRANITE, {"num_local_experts": -1}, "num_local_experts"),
        ("bamba", {"attn_layer_indices": None}, "attn_layer_indices"),
        ("bamba", {"attn_layer_indices": []}, "attn_layer_indices"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices"),
        ("bamba", {"attn_layer_indices": [True]}, "attn_layer_indices"),
        ("bamba", {"hidden_act": "relu"}, "hidden_act"),
        ("falcon_h1", {"hidden_act": "relu"}, "hidden_act"),
        ("falcon_h1", {"mamba_d_ssm": 97}, "mamba_n_heads"),
        ("falcon_h1", {"mamba_d_ssm": 0}, "mamba_d_ssm"),
        ("falcon_h1", {"mamba_d_head": 13}, "mamba_n_heads"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"key_multiplier": 0}, "key_multiplier"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, "1"]}, "ssm_multipliers"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, float("nan")]}, "ssm_multipliers"),
        ("falcon_h1", {"attention_bias": True}, "attention_in_multiplier"),
        ("falcon_h1", {"mamba_proj_bias": True}, "ssm_in_multiplier"),
        ("falcon_h1", {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "moe"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["full_attention", "conv"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*x"},
            "hybrid_override_pattern",
        ),
        ("nemotron_h", {"num_hidden_layers": 7}, "num_hidden_layers"),
        ("nemotron_h", {"n_groups": 3}, "n_groups"),
        ("nemotron_h", {"mamba_head_dim": 0}, "mamba_head_dim"),
        ("nemotron_h", {"ssm_state_size": 18}, "ssm_state_size"),
        ("nemotron_h", {"conv_kernel": 17}, "conv_kernel"),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
        ("nemotron_h", {"mlp_hidden_act": "relu3"}, "mlp_hidden_act"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32"),
        ("nemotron_h", {"sliding_window": 12}, "sliding_window"),
        ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": None}, "moe_shared_expert_intermediate_size"),
    ],
)
def test_wrong_fields_are_named(family: str, changed: dict[str, Any], named: str) -> None:
    config = config_json(tiny_model(family))
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json({**config, **changed})
