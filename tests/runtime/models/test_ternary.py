"""Ternary weights of BitNet, packed or made of floats, with inputs in 8 bits, as transformers computes them."""

from __future__ import annotations

import copy
import json
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model, with_tensors

from teneral.loader.native.library import library
from teneral.runtime.backends.describe import describe_model
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import DecoderConfig

with mock.patch("torch.compile", lambda function: function):  # which would import a compiler, for seconds
    from transformers.integrations.bitnet import (
        AutoBitLinear,
        BitLinear,
        WeightQuant,
        pack_weights,
        unpack_weights,
    )

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
OFFLINE = {**ONLINE, "quantization_mode": "offline", "modules_to_not_convert": ["lm_head"]}
DIVIDED = {"quant_method": "bitnet"}
CASES = [("bitnet", ONLINE), ("bitnet", OFFLINE), ("llama", DIVIDED)]
BACKENDS: list[Any] = [TorchBackend(), ReferenceBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())


def ternary_model(family: str, note: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """config.json, the checkpoint's tensors, and transformers' model with its linear layers replaced."""
    base = tiny_model(family)
    oracle, tensors = copy.deepcopy(base), tensors_of(base)
    generator = torch.Generator().manual_seed(0)
    for name, linear in base.named_modules():
        if not isinstance(linear, torch.nn.Linear) or ".layers." not in name:
            continue
        sizes = (linear.in_features, linear.out_features)
        ternary = torch.randint(-1, 2, (sizes[1], sizes[0]), generator=generator).float()
        scale = torch.rand(1, generator=generator) + (4.0 if note is DIVIDED else 0.1)
        own: Any
        if note is DIVIDED:
            own = BitLinear(*sizes, bias=False, dtype=torch.float32)
            own.weight.copy_(pack_weights(ternary.clone()))
        else:
            own = AutoBitLinear(*sizes, bias=False, dtype=torch.float32, online_quant=note is ONLINE)
            own.weight.data.copy_(linear.weight if note is ONLINE else ternary)
        if note is not ONLINE:
            own.weight_scale.copy_(scale)
            tensors |= {f"{name}.weight": pack_weights(ternary.clone()), f"{name}.weight_scale": scale}
        oracle.set_submodule(name, own)
    config = {**config_json(base), "quantization_config": note, "torch_dtype": "float32"}
    return config, tensors, oracle.eval()


def weights_of(oracle: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that its layers multiply with, in place of those of `tensors`."""
    found = dict(tensors)
    for name, module in oracle.named_modules():
        if isinstance(module, BitLinear):
            found[f"{name}.weight"] = unpack_weights(module.weight, torch.float32) / module.weight_scale
        elif isinstance(module, AutoBitLinear):
            weight = (
                WeightQuant.apply(module.weight)
                if module.online_quant
                else module.weight * module.weight_scale
            )
            found[f"{name}.weight"] = weight.detach()
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("family", "note"), CASES, ids=["online", "offline", "divided"])
def test_logits_and_greedy_tokens_are_the_oracles(family: str, note: dict[str, Any], backend: Any) -> None:
    config, tensors, oracle = ternary_model(family, note)
    prompts = {"a": prompt_of(40), "b": prompt_of(7, seed=1)}
    decoder = build_model(config, DictWeights(tensors), backends=[backend])

    ours = Stepper(decoder).step(prompts)

    # A last bit decides between two integers at times, which is far less than leaving inputs as they are.
    plain = with_tensors(tiny_model(family), weights_of(oracle, tensors_of(tiny_model(family))))
    for name, prompt in prompts.items():
        truth = oracle_logits(oracle, prompt)
        rounding = (oracle_logits(plain, prompt) - truth).pow(2).mean().sqrt()
        torch.testing.assert_close(ours[name][0], truth[0], atol=1e-3, rtol=1e-3)
        assert (ours[name] - truth).pow(2).mean().sqrt() < 0.5 * rounding
    if backend.name != "numpy":
        tokens = Stepper(decoder).greedy(prompts, 8)
        assert tokens == {
            name: oracle_behind(oracle, prompt, tokens[name]) for name, prompt in prompts.items()
        }
    if backend.name == "native":
        stepper = Stepper(decoder)
        pieces = [stepper.step({"a": prompts["a"][at : at + 9]})["a"] for at in range(0, 40, 9)]
        assert torch.equal(torch.cat(pieces), ours["a"])


@pytest.mark.parametrize(
    ("family", "note", "more", "message"),
    [
        ("bitnet", {**OFFLINE, "use_rms_norm": True}, {}, "use_rms_norm"),
        ("bitnet", {**OFFLINE, "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}, {}, "lm_head"),
        ("bitnet", {**OFFLINE, "rotation": True}, {}, "rotation"),
        ("bitnet", OFFLINE, {"attention_bias": True}, "has a bias"),
        ("qwen2", OFFLINE, {}, "model_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, note: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = {**config_json(tiny_model(family)), "quantization_config": note, **more}
    _, tensors, _ = ternary_model("bitnet", OFFLINE)
    with pytest.raises(ModelError, match=message):
        build_model(config, DictWeights(tensors), backends=BACKENDS[:1])


@pytest.mark.parametrize(
    ("end", "content", "message"),
    [("weight", 0xFF, "no ternary weight"), ("weight_scale", float("inf"), "weight_scale is inf")],
)
def test_damaged_weights_are_refused_by_name(end: str, content: float, message: str) -> None:
    config, tensors, _ = ternary_model("bitnet", OFFLINE)
    name = f"model.layers.1.mlp.down_proj.{end}"
    tensors[name] = torch.full_like(tensors[name], content)
    with pytest.raises(ModelError, match=message):
        Stepper(build_model(config, DictWeights(tensors), backends=BACKENDS[:1])).step({"a": [1, 2]})


def test_adapters_are_refused_where_inputs_are_rounded() -> None:
    config, _, _ = ternary_model("bitnet", OFFLINE)
    assert describe_model(json.dumps(config).encode())["adapts"] == []
    assert DecoderConfig.from_json(config).quantization is not None
