"""POST /v1/embeddings, in front of a real embedder with a tiny BERT-type model."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest
from tests.support.instances import StagedInstance, TinyParts


@pytest.fixture
async def server(start: Any, encoder_parts: TinyParts) -> Any:
    async with start(parts=encoder_parts) as running:
        yield running


async def test_an_embedding_is_the_models_own(server: Any, encoder_parts: TinyParts) -> None:
    answer = await server.post("/v1/embeddings", {"input": "hello", "model": "tiny/model"})
    assert answer.status == 200
    tokens = encoder_parts.tokenizer.encode("hello")
    wanted = encoder_parts.model.embed([tokens])[0].tolist()
    assert answer.json["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-6)
    assert answer.json["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    assert answer.json["object"] == "list"


async def test_base64_is_the_same_numbers_as_little_endian_floats(server: Any) -> None:
    plain = await server.post("/v1/embeddings", {"input": "hello", "encoding_format": "float"})
    packed = await server.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"})
    numbers = plain.json["data"][0]["embedding"]
    data = base64.b64decode(packed.json["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(numbers)}f", data)) == pytest.approx(numbers)


async def test_every_form_of_input_gives_the_same_vectors(server: Any, encoder_parts: TinyParts) -> None:
    texts = ["one", "another"]
    tokens = [encoder_parts.tokenizer.encode(text) for text in texts]
    reference = (await server.post("/v1/embeddings", {"input": texts})).json["data"]
    assert [entry["index"] for entry in reference] == [0, 1]
    for given in (tokens, tokens[0], texts[0]):
        data = (await server.post("/v1/embeddings", {"input": given})).json["data"]
        for entry, wanted in zip(data, reference, strict=False):
            assert entry["embedding"] == pytest.approx(wanted["embedding"], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": "x" * 500}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100_000}, "dimensions"),
        ({"dimensions": "many"}, "dimensions"),
    ],
)
async def test_invalid_values_are_refused_by_name(server: Any, change: dict[str, Any], param: str) -> None:
    answer = await server.post("/v1/embeddings", {"input": "x", **change})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_the_models_own_dimensions_may_be_asked_for(server: Any) -> None:
    assert (await server.post("/v1/embeddings", {"input": "x", "dimensions": 64})).status == 200


async def test_an_encoder_generates_nothing(server: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "x"})
    assert (answer.status, answer.error["param"]) == (400, "model")


async def test_a_request_that_waits_is_embedded_by_the_model_whose_tokenizer_it_takes(
    start: Any, encoder_parts: TinyParts
) -> None:
    """Another one may take that model's place meanwhile, whose tokens may mean something else."""
    other = StagedInstance(encoder_parts).let_in()
    try:
        async with start(parts=encoder_parts, loaded=False) as server:
            waiting = asyncio.create_task(server.post("/v1/embeddings", {"input": "hello"}))
            await server.eventually(lambda: server.service.admission.num_waiting == 1)
            server.service.slot.instance = other
            server.instance.let_in()
            assert (await waiting).status == 200
            embedders = [each.embedder.result() for each in (server.instance, other)]
            assert [each.statistics().texts_total for each in embedders] == [1, 0]
            server.service.slot.instance = server.instance
    finally:
        other.close()


async def test_a_decoder_embeds_nothing(start: Any) -> None:
    async with start() as server:
        answer = await server.post("/v1/embeddings", {"input": "x"})
        assert (answer.status, answer.error["param"]) == (400, "model")


async def test_fewer_dimensions_are_the_first_ones_at_unit_length(server: Any) -> None:
    whole = (await server.post("/v1/embeddings", {"input": ["hello", "x"]})).json["data"]
    fewer = (await server.post("/v1/embeddings", {"input": ["hello", "x"], "dimensions": 5})).json["data"]
    for entry, reference in zip(fewer, whole, strict=True):
        first = reference["embedding"][:5]
        length = sum(number * number for number in first) ** 0.5
        assert entry["embedding"] == pytest.approx([number / length for number in first], abs=1e-6)
    size = len(whole[0]["embedding"])
    same = (await server.post("/v1/embeddings", {"input": ["hello", "x"], "dimensions": size})).json["data"]
    assert same == whole


async def test_long_texts_are_refused_or_shortened_as_sentence_transformers_does(
    server: Any, encoder_parts: TinyParts
) -> None:
    """Their last tokens go, and the special ones stay."""
    most = encoder_parts.model.config.max_tokens
    refused = await server.post("/v1/embeddings", {"input": ["short", "x" * 3000]})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    for keep, letters in ((-1, most - 2), (100_000, most - 2), (5, 3)):
        for long, short in ((["x" * 3000, "yz"], ["x" * letters, "yz"]), ([7] * 3000, [7] * (letters + 2))):
            ours = await server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": keep})
            same = await server.post("/v1/embeddings", {"input": short})
            assert (ours.json["data"], ours.json["usage"]) == (same.json["data"], same.json["usage"])
    for keep in (0, -2, 1):
        answer = await server.post("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": keep})
        assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")
