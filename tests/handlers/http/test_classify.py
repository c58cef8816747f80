"""POST /v1/classify, in front of a real embedder with a tiny classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.instances import TinyParts
from tests.support.tiny_classifiers import classifier_parts

from teneral.runtime.models.score_functions import ScoreFunctions, sigmoid


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    made = classifier_parts(tmp_path_factory.mktemp("classifier"))
    yield made
    made.tokenizer.close()


@pytest.fixture
async def server(start: Any, parts: TinyParts) -> Any:
    async with start(parts=parts) as running:
        yield running


def softmax(row: np.ndarray) -> np.ndarray:
    return np.exp(row - row.max()) / np.exp(row - row.max()).sum()


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_each_text_has_the_probabilities_of_all_labels(
    server: Any, parts: TinyParts, path: str
) -> None:
    texts = ["hello", "a longer text", "x"]
    answer = (await server.post(path, {"model": "tiny/model", "input": texts})).json
    tokens = [parts.tokenizer.encode(text) for text in texts]
    logits = parts.model.embed(tokens)
    assert answer["object"] == "list"
    assert answer["id"].startswith("classify-")
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    for index, (entry, row) in enumerate(zip(answer["data"], logits, strict=True)):
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        assert entry["probs"] == pytest.approx(softmax(row).tolist(), abs=1e-6)
        assert entry["label"] == ("routine", "urgent", "spam")[int(row.argmax())]


async def test_logits_are_given_where_they_are_asked_for(server: Any, parts: TinyParts) -> None:
    for name in ("use_activation", "activation"):
        answer = (await server.post("/v1/classify", {"input": "hello", name: False})).json
        logits = parts.model.embed([parts.tokenizer.encode("hello")])[0]
        assert answer["data"][0]["probs"] == pytest.approx(logits.tolist(), abs=1e-5)


async def test_a_text_that_is_too_long_is_refused_or_shortened(server: Any, parts: TinyParts) -> None:
    text = "x" * 2000
    refused = await server.post("/v1/classify", {"input": text})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    most = parts.model.config.max_tokens
    for keep, num_tokens in ((-1, most), (5, 5)):
        answer = (await server.post("/v1/classify", {"input": text, "truncate_prompt_tokens": keep})).json
        assert answer["usage"]["prompt_tokens"] == num_tokens
        short = (await server.post("/v1/classify", {"input": "x" * (num_tokens - 2)})).json
        assert answer["data"] == short["data"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [1, 2]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"priority": 3}, "priority"),
        ({"softmax": True}, "softmax"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(server: Any, change: dict[str, Any], param: str) -> None:
    answer = await server.post("/v1/classify", {"input": "x", **change})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_each_kind_of_model_refuses_what_it_does_not_make(
    start: Any, server: Any, encoder_parts: TinyParts
) -> None:
    refused = await server.post("/v1/embeddings", {"input": "x"})
    assert (refused.status, refused.error["param"]) == (400, "model")
    async with start(parts=encoder_parts) as embedding:
        refused = await embedding.post("/v1/classify", {"input": "x"})
        assert (refused.status, refused.error["param"]) == (400, "model")
    async with start() as generating:
        refused = await generating.post("/v1/classify", {"input": "x"})
        assert (refused.status, refused.error["param"]) == (400, "model")


def test_config_says_how_logits_are_read() -> None:
    logits = np.array([[0.5, -90.0, 3.0]], np.float32)
    several = ScoreFunctions.of({"problem_type": "multi_label_classification"})
    assert several.probabilities(logits).tolist() == sigmoid(logits).tolist()
    assert ScoreFunctions.of({}).probabilities(logits).sum() == pytest.approx(1.0)
    one = np.array([[2.0]], np.float32)
    assert ScoreFunctions.of({}).probabilities(one)[0, 0] == pytest.approx(1 / (1 + np.exp(-2.0)))
    name = "torch.nn.modules.linear.Identity"
    for config in (
        {"sbert_ce_default_activation_function": name},
        {"sentence_transformers": {"activation_fn": name}},
    ):
        assert ScoreFunctions.of(config).relevance(one) is one
    assert ScoreFunctions.of({"sentence_transformers": 3}).relevance(one)[0, 0] < 1
    newer = {"activation_fn": name}  # config_sentence_transformers.json
    assert ScoreFunctions.of({}, newer).relevance(one) is one
    assert ScoreFunctions.of({}, newer, is_log_odds=True).relevance(one)[0, 0] < 1
    assert ScoreFunctions.of({}, [name]).relevance(one)[0, 0] < 1
