"""Native encoders and classifiers against transformers, and against themselves in other company."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.models import DictWeights
from tests.support.native import each_isa, loaded, threads
from tests.support.native_encoder import encoder_spec_of, encoder_weights_of, text_batch
from tests.support.tiny_models import ENCODERS, config_json, tensors_of, tiny_config, tiny_model
from tests.support.vision_models import PLAIN_LEVELS, oracle_inputs, random_tiles, tiny_vision_model

from teneral.runtime.backends.native.encoder import NativeEncoder, refusal
from teneral.runtime.backends.native.vision import NativeVision
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.vision import VisionTower, spec_of
from teneral.runtime.models.vision_tensors import take_vision
from teneral.runtime.tensors import DType

TORCH = {DType.BF16: torch.bfloat16, DType.F32: torch.float32}
POOLING = {"mean": {"pooling_mode_mean_tokens": True}, "cls": {"pooling_mode_cls_token": True}}
MODULES = [
    {"type": "sentence_transformers.models.Transformer"},
    {"type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"type": "sentence_transformers.models.Normalize"}

each_family = pytest.mark.parametrize("family", ENCODERS)
each_dtype = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])


@functools.cache
def model(family: str, dtype: DType, **overrides: Any) -> Any:
    return tiny_model(family, dtype=TORCH[dtype], **overrides)


@functools.cache
def classifier(family: str) -> Any:
    config = tiny_config(family, num_labels=3)
    torch.manual_seed(0)
    of = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return of


def encoder(isa: str, of: Any, dtype: DType, **files: Any) -> NativeEncoder:
    spec, weights = encoder_spec_of(of, dtype, **files), encoder_weights_of(of)
    assert refusal(spec, weights) is None
    return NativeEncoder(spec, weights, loaded(isa))


def rows_of(executor: NativeEncoder, texts: list[list[int]], cut: int = 0) -> Any:
    batch = text_batch(texts)
    x = executor.layers(batch, 0, cut, executor.embed(batch))
    return executor.finish(batch, executor.layers(batch, cut, 3, x))


def texts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Without the padding tokens, which RoBERTa's positions would skip."""
    random = np.random.default_rng(seed)
    return [random.integers(5, 256, length).tolist() for length in lengths]


@torch.no_grad()
def expected(of: Any, text: list[int], pooling: str, *, normalize: bool) -> Any:
    states = of(input_ids=torch.tensor([text])).last_hidden_state[0].float()
    pooled = states[0] if pooling == "cls" else states.mean(0)
    return (pooled / pooled.norm() if normalize else pooled).numpy()


@each_isa
@each_family
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_are_those_of_transformers(isa, family, pooling, normalize):
    of = model(family, DType.F32)
    texts = texts_of(1, 90, 17, 64)
    modules = [*MODULES, NORMALIZE] if normalize else MODULES

    ours = rows_of(encoder(isa, of, DType.F32, modules=modules, pooling=POOLING[pooling]), texts)

    for row, text in zip(ours, texts, strict=True):
        np.testing.assert_allclose(
            row, expected(of, text, pooling, normalize=normalize), atol=2e-5, rtol=1e-4
        )


@each_isa
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("heads", [1, 2, 16])
def test_every_activation_and_head_size_is_computed_as_transformers_does(isa, activation, heads):
    of = model("bert", DType.F32, hidden_act=activation, num_attention_heads=heads)
    (text,) = texts_of(40)

    ours = rows_of(encoder(isa, of, DType.F32, modules=MODULES, pooling=POOLING["mean"]), [text])

    np.testing.assert_allclose(ours[0], expected(of, text, "mean", normalize=False), atol=2e-5, rtol=1e-4)


@functools.cache  # for the libraries of all instruction sets
def means_in_bf16(family: str, seed: int) -> tuple[list[list[int]], Any, float]:
    """Texts, their means as torch computes a model in bf16 exactly, and how far from them it is in bf16."""
    of = model(family, DType.BF16, seed=seed)
    exact = type(of)(of.config).eval()
    exact.load_state_dict({name: value.float() for name, value in of.state_dict().items()})
    texts = texts_of(*range(1, 90, 6), seed=seed)
    right, theirs = (
        np.array([expected(each, text, "mean", normalize=False) for text in texts]) for each in (exact, of)
    )
    return texts, right, float(np.abs(theirs - right).mean())


@each_isa
@each_family
def test_in_bf16_embeddings_are_no_further_from_fp32_than_those_of_torch(isa, family):
    ours, of_torch = 0.0, 0.0
    for seed in range(6):
        of = model(family, DType.BF16, seed=seed)
        texts, right, error = means_in_bf16(family, seed)

        rows = rows_of(encoder(isa, of, DType.BF16, modules=MODULES, pooling=POOLING["mean"]), texts)

        ours += np.abs(rows - right).mean()
        of_torch += error
    # Both round at the same places; how these errors add up is chance.
    assert 0.1 * of_torch < ours <= 1.05 * of_torch


@each_isa
@each_family
def test_scores_are_those_of_transformers(isa, family):
    of = classifier(family)
    texts = texts_of(3, 50)

    ours = rows_of(encoder(isa, of, DType.F32), texts)

    with torch.no_grad():
        right = [of(input_ids=torch.tensor([text])).logits[0].numpy() for text in texts]
    np.testing.assert_allclose(ours, right, atol=1e-5, rtol=1e-4)


@each_isa
@each_dtype
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_text_has_the_same_bits_in_any_company(isa, dtype, data):
    executor = encoder(isa, model("bert", dtype), dtype)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    texts = texts_of(*lengths)
    with threads(isa, data.draw(st.integers(1, 5))):
        together = rows_of(executor, texts, cut=data.draw(st.integers(0, 3)))
    with threads(isa, data.draw(st.integers(1, 5))):
        alone = np.concatenate([rows_of(executor, [text]) for text in texts])

    assert (together.view(np.uint32) == alone.view(np.uint32)).all()


@each_isa
def test_towers_of_gemma4_with_clipped_products_are_computed_with_any_number_of_threads(isa):
    of, tiles = tiny_vision_model("gemma4"), random_tiles(1, 48, 32)
    config = DecoderConfig.from_json(config_json(of)).vision
    weights = take_vision(config, DictWeights(tensors_of(of)), 64)
    executor = NativeVision(spec_of(config, DType.F32), weights, loaded(isa))
    tower = VisionTower(config, DType.F32, weights, executor)
    rows = []
    for number in (1, 3):
        with threads(isa, number):
            rows += tower.encode(tiles, PLAIN_LEVELS)
    with torch.no_grad():
        inputs = oracle_inputs(of, [], tiles)
        values = {key: inputs[key] for key in ("pixel_values", "image_position_ids")}
        (made,) = of.get_image_features(**values).pooler_output
    np.testing.assert_allclose(rows[0], made, atol=2e-4)
    assert (rows[0] == rows[1]).all()


@each_isa
def test_what_does_not_fit_is_refused_before_it_reaches_memory(isa):
    executor = encoder(isa, model("bert", DType.F32), DType.F32)
    batch = text_batch([[5, 6], [7]])

    with pytest.raises(ValueError, match="outside"):
        executor.embed(replace(batch, tokens=np.array([5, 320, 6], np.int64)))
    with pytest.raises(ValueError, match="outside"):
        executor.embed(text_batch([[5] * 97]))  # there are 96 positions
    for starts in ([0, 2, 4], [1, 3], [0, 2], [0, 2, 2, 3], [0]):
        with pytest.raises(ValueError, match=r"outside|texts must have"):
            executor.embed(replace(batch, starts=np.array(starts, np.int64)))
    with pytest.raises(ValueError, match="no layers"):
        executor.layers(batch, 0, 4, executor.embed(batch))


def test_what_is_not_implemented_is_refused_by_name():
    of = model("bert", DType.F32)
    spec, weights = encoder_spec_of(of, DType.F32), encoder_weights_of(of)

    assert refusal(spec, weights) is None
    assert refusal(replace(spec, dtype=DType.F16), weights) == "native does not implement dtype = F16"
    assert refusal(replace(spec, head_dim=640), weights) == "native does not implement head_dim = 640"
