"""A model whose weights do not fit its config.json is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import DictWeights, build_model, embed
from tests.support.tiny_models import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    config_json,
    tensors_in_rows,
    tensors_of,
    tiny_model,
    with_tensors,
)
from tests.support.vision_models import tiny_vision_model

from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.encoder import Encoder
from teneral.runtime.tensors import DType


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_as_what_it_is(family):
    model = tiny_model(family)

    built = build_model(config_json(model), DictWeights(tensors_of(model)))

    assert isinstance(built, Decoder if family in DECODERS else Encoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_single_missing_tensor_is_named(family):
    model = tiny_model(family, num_hidden_layers=1)
    tensors = tensors_of(model)
    needed = [name for name in tensors if "pooler" not in name and "position_ids" not in name]
    assert len(needed) > 8
    for name in needed:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ModelError) as caught:
            build_model(config_json(model), DictWeights(rest))
        assert name.rsplit(".", 1)[0] in caught.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_single_misshapen_tensor_is_named(family):
    model = tiny_model(family, num_hidden_layers=1)
    tensors = tensors_of(model)
    for name, tensor in tensors.items():
        if "pooler" in name or "position_ids" in name:
            continue
        with pytest.raises(ModelError, match=r"config\.json asks for") as caught:
            build_model(config_json(model), DictWeights({**tensors, name: tensor[1:].clone()}))
        assert name in caught.value.message


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_norms_that_are_stored_as_one_row_have_the_bits_of_vectors(family):
    model = tiny_model(family)
    tensors = tensors_of(model)
    rows = {
        name: tensor[None] if tensor.ndim == 1 and ("norm" in name or "ln_" in name) else tensor
        for name, tensor in tensors.items()
    }

    expected, found = (
        Stepper(build_model(config_json(model), DictWeights(each))).step({"a": prompt_of(9)})["a"]
        for each in (tensors, rows)
    )

    assert sum(tensor.ndim == 2 for tensor in rows.values()) > sum(t.ndim == 2 for t in tensors.values())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("which", ["gate_up_proj", "down_proj"])
def test_of_stacked_experts_the_misshapen_tensor_is_named(which: str) -> None:
    model = tiny_model("qwen3_5_moe_text")
    tensors = tensors_in_rows(model)
    name = f"model.layers.1.mlp.experts.{which}"
    num, *sides = tensors[name].shape

    with pytest.raises(ModelError, match=r"config\.json asks for") as caught:
        build_model(config_json(model), DictWeights({**tensors, name: torch.zeros(num + 1, *sides)}))
    assert f"tensor {name} has shape" in caught.value.message


def test_more_layers_in_the_config_than_in_the_weights_is_an_error():
    model = tiny_model("llama", num_hidden_layers=2)

    with pytest.raises(ModelError, match=r"model\.layers\.2\."):
        build_model({**config_json(model), "num_hidden_layers": 3}, DictWeights(tensors_of(model)))


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.float64])
def test_weights_of_another_kind_than_half_or_single_precision_are_refused(family, dtype):
    model = tiny_model(family)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}

    with pytest.raises(ModelError, match="not computed in") as caught:
        build_model(config_json(model), DictWeights(tensors))
    assert "bf16, fp16 or fp32" in caught.value.hint


def test_integers_without_their_scales_are_refused_by_name():
    model = tiny_model("llama")
    tensors = {name: tensor.to(torch.int8) for name, tensor in tensors_of(model).items()}

    with pytest.raises(ModelError, match=r"no model\.embed_tokens\.weight_scale"):
        build_model(config_json(model), DictWeights(tensors))


def mixed(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors in bf16, fp32 and fp16 in turn."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
    return {
        name: tensor.to(dtypes[number % len(dtypes)])
        for number, (name, tensor) in enumerate(tensors_of(model).items())
    }


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", "float32", 2e-4),
        ("qwen2", "float32", 2e-4),
        ("mixtral", "float32", 2e-4),  # in bf16 a row may choose other experts
        ("llama", "bfloat16", 0.25),
        ("qwen2", "bfloat16", 0.25),
    ],
)
def test_a_checkpoint_of_several_dtypes_is_computed_with_each_as_stored(
    family: str, dtype: str, tolerance: float, backend: str
) -> None:
    model = tiny_model(family)
    tensors = mixed(model)
    oracle = with_tensors(model, tensors)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt_of(20)])).logits[0]
    backends = BackendChoice(backend, compute_dtype=dtype).model_backends()
    ours = build_model(config_json(model), DictWeights(tensors), backends=backends)
    logits = Stepper(ours).step({"a": prompt_of(20)})["a"]
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_encoder_of_several_dtypes_is_computed_with_each_as_stored(backend: str) -> None:
    model = tiny_model("bert")
    tensors = mixed(model)
    oracle = with_tensors(model, tensors)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt_of(20)])).last_hidden_state[0].mean(0)
    backends = BackendChoice(backend, compute_dtype="float32").model_backends()
    ours = build_model(config_json(model), DictWeights(tensors), backends=backends)
    expected /= expected.norm()
    np.testing.assert_allclose(ours.embed([prompt_of(20)])[0], expected.numpy(), atol=1e-5)


def test_most_weights_decide_the_dtype_of_the_rest() -> None:
    model = tiny_model("llama")
    tensors = tensors_of(model)
    first = "model.embed_tokens.weight"
    halved = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert build_model(config_json(model), DictWeights({**halved, first: tensors[first]})).dtype is DType.BF16
    assert build_model(config_json(model), DictWeights({**tensors, first: halved[first]})).dtype is DType.F32


def test_a_head_of_its_own_is_used_also_where_the_config_says_tied():
    model = tiny_model("llama", tie_word_embeddings=True)
    tensors = tensors_of(model)
    other_head = {**tensors, "lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}
    config = config_json(model)

    tied = build_model(config, DictWeights(other_head))
    untied = build_model({**config, "tie_word_embeddings": False}, DictWeights(other_head))

    assert Stepper(build_model(config, DictWeights(tensors))).step({"a": prompt_of(4)})["a"].abs().max() > 0
    assert Stepper(tied).step({"a": prompt_of(4)})["a"].abs().max() == 0, "as transformers has it"
    assert Stepper(untied).step({"a": prompt_of(4)})["a"].abs().max() == 0


def test_a_missing_head_is_an_error_when_the_config_does_not_tie_it():
    model = tiny_model("llama", tie_word_embeddings=True)

    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        build_model({**config_json(model), "tie_word_embeddings": False}, DictWeights(tensors_of(model)))


def test_names_without_their_usual_prefix_are_found():
    model = tiny_model("llama", tie_word_embeddings=True)
    tensors = tensors_of(model)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    prompt = {"a": prompt_of(7)}

    logits = [
        Stepper(build_model(config_json(model), DictWeights(named))).step(prompt)["a"]
        for named in (tensors, bare)
    ]

    assert torch.equal(*logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_within_a_model_with_a_head_is_found(family):
    model = tiny_model(family)
    root = "bert." if family == "bert" else "roberta."
    tensors = tensors_of(model)
    wrapped = {root + name: tensor for name, tensor in tensors.items()}
    config = config_json(model)

    embeddings = [
        embed(build_model(config, DictWeights(named)), [[1, 5, 6, 2]]) for named in (tensors, wrapped)
    ]

    assert torch.equal(*embeddings)


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "gemma3", "gemma4", "qwen3_vl"])
def test_files_without_the_towers_tensors_are_served_as_text(family: str) -> None:
    model, tokens = tiny_vision_model(family), list(range(20))
    tensors, config = tensors_of(model), config_json(model)
    text = {
        name: each for name, each in tensors.items() if "vision_tower." not in name and ".visual." not in name
    }
    decoder = build_model(config, DictWeights(text))
    assert (decoder.vision, decoder.spec.takes_images) == (None, False)
    logits = Stepper(decoder).step({"a": tokens})["a"]
    assert torch.equal(
        logits,
        Stepper(build_model(config_json(model), DictWeights(tensors_of(model)))).step({"a": tokens})["a"],
    )


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4"])
@pytest.mark.parametrize("says_whole", [True, False])
def test_a_text_model_saved_without_its_tower_is_served(family: str, says_whole: bool) -> None:
    """With the config of the whole or of the text, and names of either."""
    whole, tokens = tiny_vision_model(family), list(range(20))
    config = config_json(whole)
    if not says_whole:
        config = config["text_config"] | {"tie_word_embeddings": config["tie_word_embeddings"]}
    config["architectures"] = [type(whole).__name__.replace("ForConditionalGeneration", "ForCausalLM")]
    right = Stepper(build_model(config_json(whole), DictWeights(tensors_of(whole)))).step({"a": tokens})["a"]
    own = {name: each for name, each in tensors_of(whole).items() if ".language_model." in name}
    own |= {name: each for name, each in tensors_of(whole).items() if name == "lm_head.weight"}
    for root in ("model.language_model.", "model."):
        named = {name.replace("model.language_model.", root): each for name, each in own.items()}
        decoder = build_model(config, DictWeights(named))
        assert decoder.vision is None
        assert torch.equal(Stepper(decoder).step({"a": tokens})["a"], right)
