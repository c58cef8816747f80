"""Every decoder family and variant computes what transformers computes."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, forward, torch_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model, transformers

from teneral.loader.artifact import open_artifact
from teneral.loader.load.load import WeightLoad
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.weights import StreamedWeights

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama, heads wider than hidden": ("llama", {"head_dim": 24}),
    "llama, a key head a query head": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, another base and epsilon": ("llama", {"rope_theta": 500_000.0, "rms_norm_eps": 1e-3}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama rope linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama rope dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama rope llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama rope yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
    "llama rope yarn with every option": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.8,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral sliding window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding window above layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 window by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def both(variant: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """transformers' model and ours over the same weights."""
    family, overrides = VARIANTS[variant]
    oracle = tiny_model(family, dtype=dtype, **overrides)
    return oracle, decoder_of(oracle, tensors_of(oracle))


def decoder_of(oracle: Any, tensors: dict[str, torch.Tensor]) -> Decoder:
    decoder = torch_model(config_json(oracle), DictWeights(tensors))
    assert isinstance(decoder, Decoder)
    return decoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prefill_gives_the_oracles_logits_in_every_row(variant):
    oracle, decoder = both(variant)
    prompt = prompt_of(75)

    ours = Stepper(decoder).step({"a": prompt})["a"]

    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_head_of_its_own_counts_although_the_config_says_tied(tmp_path, is_packed):
    """transformers loads such a checkpoint so; packing keeps the two apart, because their bytes differ."""
    saved = tiny_model("llama")
    saved.save_pretrained(tmp_path / "model")
    config = {**json.loads((tmp_path / "model" / "config.json").read_text()), "tie_word_embeddings": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    folder = FileStore(tmp_path / "model")
    if is_packed:
        folder, plain = FileStore(tmp_path / "packed"), folder
        pack(plain, folder)
        plain.close()
    prompt = prompt_of(20)
    with WeightLoad(folder, open_artifact(folder)) as load:
        load.start()
        for group in range(len(load.manifest.groups)):
            load.wait(group)
        decoder = torch_model(config, StreamedWeights(load))
        ours = Stepper(decoder).step({"a": prompt})["a"]
    folder.close()

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_of_a_batch_of_different_lengths_are_the_oracles(variant):
    oracle, decoder = both(variant)
    prompts = {"short": prompt_of(3), "middle": prompt_of(17), "long": prompt_of(41)}

    ours = Stepper(decoder).greedy(prompts, 33)

    expected = {name: oracle_behind(oracle, prompt, ours[name]) for name, prompt in prompts.items()}
    assert ours == expected
    assert len(set(expected["long"])) > 3, "the oracle only repeats itself, which would show little"


@pytest.mark.parametrize("variant", ["llama", "mistral sliding window", "qwen3 window by layer"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 30])
def test_a_prefill_in_chunks_gives_the_logits_of_a_whole_one(variant, chunk):
    _, decoder = both(variant)
    prompt = prompt_of(75)
    whole = Stepper(decoder).step({"a": prompt})["a"]

    stepper = Stepper(decoder)
    chunks = [stepper.step({"a": prompt[at : at + chunk]})["a"] for at in range(0, len(prompt), chunk)]

    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "mistral sliding window"])
def test_scattered_blocks_give_the_logits_of_consecutive_ones(variant):
    _, decoder = both(variant)
    prompt = prompt_of(60)
    expected = Stepper(decoder).step({"a": prompt})["a"]
    order = list(range(64))
    random.Random(7).shuffle(order)

    stepper = Stepper(decoder, block_order=order)
    rows = [stepper.step({"a": prompt[:33]})["a"], stepper.step({"a": prompt[33:59]})["a"]]
    rows.append(stepper.step({"a": prompt[59:]})["a"])

    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


def test_a_batch_mixes_prefills_chunks_and_single_tokens():
    oracle, decoder = both("qwen2 sliding window above layer 1")
    texts = {name: prompt_of(60, seed=seed) for seed, name in enumerate("abc")}
    stepper = Stepper(decoder)
    stepper.step({"a": texts["a"][:59], "b": texts["b"][:20]})

    rows = stepper.step({"c": texts["c"], "a": texts["a"][59:], "b": texts["b"][20:]})

    torch.testing.assert_close(rows["a"], oracle_logits(oracle, texts["a"])[59:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows["b"], oracle_logits(oracle, texts["b"])[20:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows["c"], oracle_logits(oracle, texts["c"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "llama rope yarn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_exact_as_the_oracle_is(variant, dtype):
    oracle, decoder = both(variant, dtype)
    exact = tiny_model(VARIANTS[variant][0], **VARIANTS[variant][1])
    exact.load_state_dict(oracle.state_dict())
    prompt = prompt_of(75)
    truth = oracle_logits(exact, prompt)

    ours = Stepper(decoder).step({"a": prompt})["a"]

    own_error = (ours - truth).pow(2).mean().sqrt()
    oracle_error = (oracle_logits(oracle, prompt) - truth).pow(2).mean().sqrt()
    assert own_error < 1.25 * oracle_error


def test_norms_kept_in_fp32_with_bf16_matrices_give_the_same_logits():
    oracle, decoder = both("llama", torch.bfloat16)
    mixed = {name: t.float() if "norm" in name else t for name, t in tensors_of(oracle).items()}
    prompt = prompt_of(9)

    ours = Stepper(decoder_of(oracle, mixed)).step({"a": prompt})["a"]

    assert torch.equal(ours, Stepper(decoder).step({"a": prompt})["a"])


@pytest.mark.parametrize("rows", [[19, 4], [7], []])
def test_only_the_rows_that_are_asked_for_get_logits(rows):
    _, decoder = both("llama")
    whole = Stepper(decoder).step({"a": prompt_of(20)})["a"]
    stepper = Stepper(decoder)
    batch = replace(stepper.batch({"a": prompt_of(20)}), logit_rows=np.array(rows, dtype=np.int64))

    some = forward(decoder, batch, stepper.kv)

    assert some.shape == (len(rows), decoder.config.vocab_size)
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=1e-5)
