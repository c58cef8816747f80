"""POST /v1/score and /v1/rerank: cross-encoders over pairs of texts, and embeddings compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.instances import TinyParts
from tests.support.tiny_classifiers import classifier_parts, pair_ids, tiny_classifier

DOCUMENTS = ["a text", "quite another one", "x", "a text"]


@pytest.fixture(scope="module", params=["roberta", "bert"])
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def parts(family: str, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    made = classifier_parts(tmp_path_factory.mktemp("reranker"), family=family, num_labels=1)
    yield made
    made.tokenizer.close()


@pytest.fixture
async def server(start: Any, parts: TinyParts) -> Any:
    async with start(parts=parts) as running:
        yield running


@pytest.fixture
async def embedding(start: Any, encoder_parts: TinyParts) -> Any:
    async with start(parts=encoder_parts) as running:
        yield running


@torch.no_grad()
def oracle_scores(family: str, first: str, seconds: list[str]) -> list[float]:
    """The scores of transformers for pairs with their template's special tokens. One of these has the id of RoBERTa's
    padding: positions are given, so that it is not skipped.
    """
    oracle = tiny_classifier(family, num_labels=1)
    first_position = 0 if family == "bert" else oracle.config.pad_token_id + 1
    scores = []
    for second in seconds:
        ids, types = (torch.tensor([numbers]) for numbers in pair_ids(first, second, family))
        positions = torch.arange(ids.shape[1])[None] + first_position
        answer = oracle(input_ids=ids, token_type_ids=types, position_ids=positions)
        scores.append(answer.logits.item())
    return scores


def sigmoid(logits: list[float]) -> list[float]:
    return (1 / (1 + np.exp(-np.array(logits)))).tolist()


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_pairs_are_scored_together(server: Any, family: str, path: str) -> None:
    answer = (await server.post(path, {"model": "tiny/model", "text_1": "query", "text_2": DOCUMENTS})).json
    wanted = oracle_scores(family, "query", DOCUMENTS)
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(sigmoid(wanted), abs=1e-4)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(
        len(pair_ids("query", each, family)[0]) for each in DOCUMENTS
    )
    logits = await server.post("/v1/score", {"text_1": "query", "text_2": DOCUMENTS, "use_activation": False})
    assert [entry["score"] for entry in logits.json["data"]] == pytest.approx(wanted, abs=1e-4)


async def test_as_many_first_texts_as_second_ones_are_paired_one_by_one(server: Any, family: str) -> None:
    body = {"text_1": ["q", "query"], "text_2": ["x", "a text"]}
    answer = (await server.post("/v1/score", body)).json
    wanted = sigmoid([*oracle_scores(family, "q", ["x"]), *oracle_scores(family, "query", ["a text"])])
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_in_the_order_of_their_relevance(server: Any, family: str, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    body = {"model": "tiny/model", "query": "query", "documents": documents}
    answer = (await server.post(path, body)).json
    wanted = sigmoid(oracle_scores(family, "query", DOCUMENTS))
    order = sorted(range(4), key=lambda index: -wanted[index])
    assert [entry["index"] for entry in answer["results"]] == order
    for entry in answer["results"]:
        assert entry["relevance_score"] == pytest.approx(wanted[entry["index"]], abs=1e-4)
        assert entry["document"] == {"text": DOCUMENTS[entry["index"]]}
    best = (await server.post(path, {**body, "top_n": 2, "return_documents": False})).json
    assert [entry["index"] for entry in best["results"]] == order[:2]
    assert all("document" not in entry for entry in best["results"])
    every = (await server.post(path, {**body, "top_n": 0})).json
    assert len(every["results"]) == 4


async def test_embeddings_are_compared_by_their_cosine(embedding: Any, encoder_parts: TinyParts) -> None:
    tokens = [encoder_parts.tokenizer.encode(text) for text in ("query", *DOCUMENTS)]
    vectors = encoder_parts.model.embed(tokens).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    answer = (await embedding.post("/v1/score", {"text_1": "query", "text_2": DOCUMENTS})).json
    wanted = (vectors[1:] @ vectors[0]).tolist()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(map(len, tokens))
    ranked = (await embedding.post("/v1/rerank", {"query": "query", "documents": DOCUMENTS})).json
    assert [entry["relevance_score"] for entry in ranked["results"]] == pytest.approx(
        sorted(wanted, reverse=True), abs=1e-5
    )


@pytest.mark.parametrize("embeds", [False, True])
async def test_long_documents_are_refused_or_shortened(server: Any, embedding: Any, embeds: bool) -> None:
    server = embedding if embeds else server
    body = {"query": "query", "documents": ["x" * 3000]}
    refused = await server.post("/v1/rerank", body)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    for most in (4, 100_000):
        short = (await server.post("/v1/rerank", {**body, "max_tokens_per_doc": most})).json
        if most == 4:
            same = (await server.post("/v1/rerank", {"query": "query", "documents": ["xxxx"]})).json
            assert short["results"][0]["relevance_score"] == same["results"][0]["relevance_score"]
            assert short["usage"] == same["usage"]
    whole = (await server.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1})).json
    assert whole["results"][0]["relevance_score"] == short["results"][0]["relevance_score"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": [], "text_2": "x"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ["y"] * 2049}, "text_2"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v2/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": [{"title": "x"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "rank_fields": ["a"]}, "rank_fields"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(server: Any, path: str, body: Any, param: str) -> None:
    answer = await server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_classifier_of_several_labels_ranks_nothing(start: Any, tmp_path: Any) -> None:
    parts = classifier_parts(tmp_path)
    async with start(parts=parts) as server:
        refused = await server.post("/v1/score", {"text_1": "x", "text_2": "y"})
        assert (refused.status, refused.error["param"]) == (400, "model")
    parts.tokenizer.close()
