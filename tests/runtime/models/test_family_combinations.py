"""Every family with all that changes its weights, as transformers computes the weights that are meant.

The families are those of `FAMILY_MODULES`: one that is added is in each of these tests, and fails where a
combination is wrong or refused. A refusal that is meant is stated here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapters import load_adapter, merged, save_adapter
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint, is_projection
from tests.support.models import DictWeights, build_model
from tests.support.native_decoder import NativeStepper, new_pool
from tests.support.quantized import AWQ, FP8, FP8_ROWS, GPTQ, INT8_ROWS, PACKED_INT4, meant
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import (
    DISTINCT_NATIVE,
    NATIVE_ONLY,
    config_json,
    tensors_of,
    tiny_config,
    tiny_model,
    with_tensors,
)

from teneral.loader.errors import TeneralError
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.prune import PruneOptions
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.describe import describe_model
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.decoder_config import FAMILY_MODULES, DecoderConfig

PROMPTS = {"a": prompt_of(40), "b": prompt_of(7, seed=1)}


class Checkpoint(NamedTuple):
    """The files of a model directory, and transformers' model with the weights that it means."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    oracle: Any


@functools.cache
def base_of(family: str) -> Any:
    """A model whose matrices have groups of 32 columns, and some of them runs of 64."""
    config = tiny_config(family).to_dict()
    return tiny_model(family, **({"moe_intermediate_size": 64} if "moe_intermediate_size" in config else {}))


@functools.cache
def logits_of_base(family: str) -> torch.Tensor:
    return oracle_logits(base_of(family), PROMPTS["a"])


@functools.cache
def has_experts(family: str) -> bool:
    return DecoderConfig.from_json(config_json(base_of(family))).experts is not None


# -- ways to change the weights


def foreign(note: dict[str, Any], *, act_order: bool = False) -> Callable[[str, Path], Checkpoint]:
    def make(family: str, folder: Path) -> Checkpoint:
        config, tensors, floats = foreign_checkpoint(base_of(family), note, act_order=act_order)
        return Checkpoint(config, tensors, with_tensors(base_of(family), floats))

    return make


def packed(**options: Any) -> Callable[[str, Path], Checkpoint]:
    """The model that `teneral pack` makes with these options, as `teneral unpack` gives it back."""

    def make(family: str, folder: Path) -> Checkpoint:
        plain = folder / "plain"
        plain.mkdir()
        save_file(tensors_of(base_of(family)), plain / "model.safetensors")
        (plain / "config.json").write_text(json.dumps(config_json(base_of(family))))
        pack(open_source(str(plain)), open_store(str(folder / "packed")), **options)
        unpack(open_source(str(folder / "packed")), folder / "out")
        tensors = {
            name: tensor
            for path in sorted((folder / "out").glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        config = json.loads((folder / "out" / "config.json").read_text())
        return Checkpoint(config, tensors, with_tensors(base_of(family), meant(tensors)))

    return make


WAYS: dict[str, Callable[[str, Path], Checkpoint]] = {
    "gptq": foreign(GPTQ),
    "gptq act-order": foreign({**GPTQ, "desc_act": True}, act_order=True),
    "gptq 8 bits": foreign({**GPTQ, "bits": 8, "sym": True}),
    "awq": foreign(AWQ),
    "fp8 blocks": foreign(FP8),
    "fp8 matrices": foreign({"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 rows": foreign(FP8_ROWS),
    "compressed int4": foreign(PACKED_INT4),
    "compressed int8": foreign(INT8_ROWS),
    "int8": packed(quantize=QuantizeOptions(8)),
    "int4": packed(quantize=QuantizeOptions(4)),
    "int4 asymmetric": packed(quantize=QuantizeOptions(4, 32, asymmetric=True)),
    "prune half": packed(prune=PruneOptions(0.5)),
    "prune 2:4": packed(prune=PruneOptions(None)),
}

BACKENDS: list[Any] = [TorchBackend(), ReferenceBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())


def backends_of(family: str) -> list[Any]:
    return BACKENDS[2:] if family in NATIVE_ONLY else BACKENDS


def decoder_of(made: Checkpoint, backend: Any) -> Decoder:
    decoder = build_model(made.config, DictWeights(made.tensors), backends=[backend])
    assert isinstance(decoder, Decoder)
    return decoder


def logits_of(decoder: Decoder, prompt: list[int]) -> torch.Tensor:
    return Stepper(decoder).step({"a": prompt})["a"]


# Combinations that are refused, with words of the reason
REFUSED = {
    ("gpt_oss", "int8"): "all experts of a layer in one tensor",
    ("gpt_oss", "int4"): "all experts of a layer in one tensor",
    ("gpt_oss", "int4 asymmetric"): "all experts of a layer in one tensor",
}
# These ways read the tensors of a layer as another one does, and store their numbers otherwise: one family or more for
# each layout of weights has them. All other ways are tested with every family.
ALIKE = ("gptq 8 bits", "fp8 matrices", "fp8 rows", "compressed int8", "int4 asymmetric", "prune 2:4")
LAYOUTS = (
    *(
        "llama",
        "qwen3",
        "gpt2",
        "gpt_neox",
        "phi3",
        "cohere2",
        "gemma3n_text",
        "gemma4_text",
        "lfm2",
    ),  # alone, joined, turned around
    *(
        "mixtral",
        "qwen2_moe",
        "glm4_moe",
        "ernie4_5_moe",
        "gpt_oss",
        "llama4_text",
        "lfm2_moe",
    ),  # with experts
    *("deepseek_v2", "deepseek_v3"),  # with latents
    *("qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "falcon_h1", "nemotron_h"),  # with states
)
assert set(LAYOUTS) <= FAMILY_MODULES.keys()
ALL = [(family, way) for family in DISTINCT_NATIVE for way in WAYS if way not in ALIKE or family in LAYOUTS]


@pytest.mark.parametrize("family", DISTINCT_NATIVE)
def test_inspect_says_which_families_are_quantised(family: str) -> None:
    described = describe_model(json.dumps(config_json(base_of(family))).encode())

    assert described["quantizes"] is ((family, "int4") not in REFUSED)


@pytest.mark.parametrize(("family", "way"), REFUSED)
def test_what_is_refused_is_refused_by_name(family: str, way: str, tmp_path: Path) -> None:
    with pytest.raises(TeneralError, match=REFUSED[family, way]):
        WAYS[way](family, tmp_path)


@pytest.mark.parametrize(("family", "way"), [each for each in ALL if each not in REFUSED])
def test_each_backend_computes_the_weights_that_are_meant(family: str, way: str, tmp_path: Path) -> None:
    made = WAYS[way](family, tmp_path)
    expected = {name: oracle_logits(made.oracle, prompt) for name, prompt in PROMPTS.items()}
    assert (logits_of_base(family) - expected["a"]).abs().max() > 1e-3, "the weights are others than before"

    continued: dict[str, list[int]] = {}
    for backend in backends_of(family):
        is_reordered = way == "gptq act-order" and has_experts(family) and family != "gpt_oss"
        if is_reordered and backend.name == "native":
            with pytest.raises(ModelError, match="experts with columns in an order"):
                decoder_of(made, backend)
            continue
        decoder = decoder_of(made, backend)
        ours = Stepper(decoder).step(PROMPTS)
        for name in PROMPTS:
            torch.testing.assert_close(ours[name], expected[name], atol=1e-3, rtol=1e-3, msg=backend.name)
        if backend.name != "numpy":
            tokens = Stepper(decoder).greedy(PROMPTS, 4)
            continued = continued or {
                name: oracle_behind(made.oracle, prompt, tokens[name]) for name, prompt in PROMPTS.items()
            }
            assert tokens == continued, backend.name


@pytest.mark.parametrize("way", ["gptq", "awq"])
@pytest.mark.parametrize("family", DISTINCT_NATIVE)
def test_fp16_checkpoints_in_bf16_are_as_close_as_transformers_is(
    family: str, way: str, tmp_path: Path
) -> None:
    made = WAYS[way](family, tmp_path)
    halves = {name: each.half() if each.is_floating_point() else each for name, each in made.tensors.items()}
    # An error in a state stays in the rows behind it, and so does another choice of experts: of several prompts some
    # have one.
    is_chancy = family == "bamba" or has_experts(family)
    prompts = [prompt_of(40, seed=seed) for seed in range(4 if is_chancy else 1)]

    def error_of(logits_of: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        errors = [(logits_of(each) - oracle_logits(made.oracle, each)).pow(2) for each in prompts]
        return torch.cat(errors).mean(-1).sqrt()

    rounded = with_tensors(made.oracle, tensors_of(made.oracle)).to(torch.bfloat16)
    theirs = error_of(lambda prompt: oracle_logits(rounded, prompt))

    for backend in BACKENDS[2:]:
        native = NativeBackend("bfloat16")
        decoder = decoder_of(made._replace(tensors=halves), native)
        error = error_of(functools.partial(logits_of, decoder))
        share = 0.25 if has_experts(family) else 0.5  # of rows for which rounding chooses no other expert
        assert error.quantile(share) < 1.25 * theirs.quantile(share), backend.name


@pytest.mark.parametrize("way", ["prune half", "prune 2:4"])
@pytest.mark.parametrize("family", DISTINCT_NATIVE)
def test_half_of_each_projection_and_nothing_else_is_pruned(family: str, way: str, tmp_path: Path) -> None:
    before, after = tensors_of(base_of(family)), WAYS[way](family, tmp_path).tensors

    stacked = {name for name, tensor in before.items() if tensor.ndim == 3 and tensor.shape[1] > 1}
    projections = stacked | set(filter(is_projection, before))
    assert len(projections) >= 3 * 4
    for name, tensor in after.items():
        if name in projections:
            zeros = (tensor == 0).float().mean().item()
            assert zeros == pytest.approx(0.5, abs=0.02), name
            assert torch.equal(tensor[tensor != 0], before[name][tensor != 0]), name
        else:
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("family", DISTINCT_NATIVE)
def test_an_adapter_of_all_linear_modules_gives_the_merged_model(family: str, tmp_path: Path) -> None:
    base = base_of(family)
    config = DecoderConfig.from_json(config_json(base))
    excluded = ["q_b_proj", "kv_b_proj", "shared_expert_gate", "router"]
    excluded += ["per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"]
    excluded += ["linear_left", "linear_right", "modality_router", "correction_coefs", "prediction_coefs"]
    excluded += [f"altup_{kind}projections.{number}" for kind in ("", "unembed_") for number in range(3)]
    folder = save_adapter(
        tmp_path / "a", base, target_modules="all-linear", size=0.15, exclude_modules=excluded
    )
    adapter = load_adapter(folder, config)
    oracle = merged(base, folder)
    expected, plain = oracle_logits(oracle, PROMPTS["a"]), oracle_logits(base, PROMPTS["a"])
    assert (plain - expected).abs().max() > 0.05

    for backend in [each for each in backends_of(family) if each.name != "torch"]:
        decoder = build_model(config_json(base), DictWeights(tensors_of(base)), backends=[backend])
        assert decoder.executor.takes_adapters
        stepper = NativeStepper(decoder.executor, new_pool(decoder.spec, 16, 4), adapters={"a": adapter})
        ours = stepper.step(PROMPTS)
        np.testing.assert_allclose(ours["a"], expected, atol=1e-3, rtol=1e-3, err_msg=backend.name)
        np.testing.assert_allclose(
            ours["b"], oracle_logits(base, PROMPTS["b"]), atol=1e-3, rtol=1e-3, err_msg=backend.name
        )
