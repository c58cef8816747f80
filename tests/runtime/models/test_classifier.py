"""Classifiers score texts as transformers does, from the model to `context.model.classify`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import DictWeights, WaitedGate, build_model, embed, torch_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_classifiers import save_classifier, tiny_classifier
from tests.support.tiny_models import ENCODERS, config_json, save_tiny, tensors_of

from teneral.handlers.function.context import Context
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import ContextLengthError, ModelError, RequestError
from teneral.runtime.instance.instance import Instance


@torch.no_grad()
def oracle_scores(oracle: Any, token_lists: list[list[int]]) -> torch.Tensor:
    """One text at a time, so that nothing is padded."""
    return torch.cat([oracle(input_ids=torch.tensor([tokens])).logits for tokens in token_lists]).float()


# Without the padding token, which RoBERTa's positions would skip.
TEXTS = [[5 + index % 200 for index in range(length)] for length in (3, 40, 3, 17, 80)]


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_transformers(family, dtype):
    oracle = tiny_classifier(family, dtype)
    model = torch_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert model.config.labels == ("routine", "urgent", "spam")
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        embed(model, TEXTS), oracle_scores(oracle, TEXTS), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("family", ENCODERS)
def test_a_head_that_is_missing_or_of_another_shape_is_found_at_once(family):
    oracle = tiny_classifier(family)
    tensors = tensors_of(oracle)
    head = [name for name in tensors if name.startswith("classifier.") or "pooler" in name]
    assert len(head) == 4
    for name in head:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ModelError, match=name):
            build_model(config_json(oracle), DictWeights(rest))
        with pytest.raises(ModelError, match=name):
            build_model(config_json(oracle), DictWeights({**rest, name: tensors[name][1:].clone()}))


def test_the_head_waits_at_a_gate_of_its_own():
    oracle = tiny_classifier("bert")
    asked: list[list[str]] = []

    class Recording(DictWeights):
        def gate(self, names):
            names = list(names)
            return WaitedGate(lambda: asked.append(names))

    build_model(config_json(oracle), Recording(tensors_of(oracle))).embed(TEXTS[:1])
    assert set(asked[-1]) == {
        f"{layer}.{part}" for layer in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def test_a_handler_classifies_with_a_model_that_streams_in(folder):
    with Instance(ServeConfig(model=str(folder))) as instance:
        model = Context(instance, request_id="classify", timeout_s=60).model
        texts = ["a", "soft wings", "a nymph climbs a stem"]
        assert model.labels() == ("routine", "urgent", "spam")
        expected = oracle_scores(tiny_classifier("bert"), [model.tokenize(text) for text in texts])
        scores = model.classify(texts)
        np.testing.assert_allclose(scores, expected, atol=1e-4)

        async def in_async_handlers() -> tuple[Any, Any]:
            return await model.aclassify(texts), await model.alabels()

        again, labels = asyncio.run(in_async_handlers())
        np.testing.assert_allclose(again, scores, atol=1e-5)
        assert labels == model.labels()
        with pytest.raises(ModelError, match="makes no embeddings"):
            model.embed(texts)
        with pytest.raises(ContextLengthError):
            model.classify("x" * 500)


def test_a_model_without_labels_does_not_classify(tmp_path):
    with Instance(ServeConfig(model=str(save_tiny("bert", tmp_path / "encoder")))) as instance:
        model = Context(instance, request_id="classify", timeout_s=60).model
        assert model.labels() == ()
        with pytest.raises(ModelError, match="no labels"):
            model.classify("text")


@pytest.mark.parametrize("backend", [NativeBackend, ReferenceBackend, TorchBackend])
def test_a_pairs_second_text_has_the_type_of_its_own(backend):
    oracle = tiny_classifier("bert")
    model = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend()])
    types = [[0] * 20 + [1] * 20, None, [1] * 17]
    texts = [TEXTS[1], TEXTS[0], TEXTS[3]]
    scores = model.embed(texts, types)
    with torch.no_grad():
        wanted = torch.cat(
            [
                oracle(
                    input_ids=torch.tensor([text]), token_type_ids=torch.tensor([own or [0] * len(text)])
                ).logits
                for text, own in zip(texts, types, strict=True)
            ]
        )
    torch.testing.assert_close(torch.from_numpy(scores), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="token type"):
        model.embed([[5, 6]], [[0, 2]])
