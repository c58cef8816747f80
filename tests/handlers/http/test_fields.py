"""No field is ignored with a 200: the table of fields, the bodies, and the types of OpenAI's own package agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from tests.support.field_tables import OTHER_SERVERS, as_markdown

from teneral.handlers.anthropic.bodies import ROUTES as ANTHROPIC
from teneral.handlers.openai.fields import ROUTES, Effect
from teneral.handlers.openai.llama_cpp import InfillBody, PromptedBody
from teneral.handlers.openai.rerank import ClassifyBody, RerankBody, ScoreBody
from teneral.handlers.openai.responses_body import CountTokensBody, ResponsesBody
from teneral.handlers.openai.schemas import ChatBody, CompletionBody, EmbeddingBody
from teneral.handlers.openai.tokens import DetokenizeBody, PromptBody, TokenizeBody

ROOT = Path(__file__).parents[3]
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": PromptBody,
    "/completion": PromptedBody,
    "/infill": InfillBody,
    "/v1/classify": ClassifyBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
}
OPENAI: dict[str, tuple[type, ...]] = {
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsBase,
        chat_create_params.CompletionCreateParamsStreaming,
    ),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams,),
}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_the_fields_of_the_body_and_no_others(route: str) -> None:
    assert set(ROUTES[route]) == set(BODIES[route].__struct_fields__)


@pytest.mark.parametrize("route", OPENAI)
def test_every_field_of_openais_own_types_is_in_the_table(route: str) -> None:
    names = {name for kind in OPENAI[route] for name in get_type_hints(kind)}
    assert names - set(ROUTES[route]) == set()


@pytest.mark.parametrize("route", OTHER_SERVERS)
def test_every_field_that_vllm_and_llama_cpp_know_is_in_the_table(route: str) -> None:
    for names in OTHER_SERVERS[route]:
        assert names - set({**ROUTES, **ANTHROPIC}[route]) == set()


def test_the_documentation_has_this_table() -> None:
    assert as_markdown() in (ROOT / "docs" / "openai.md").read_text()


@pytest.mark.parametrize("route", LEAST)
async def test_refused_fields_are_refused_by_name_unless_null(start: Any, route: str) -> None:
    async with start() as server:
        for name, (effect, _) in ROUTES[route].items():
            if effect is Effect.REFUSED:
                value = {"no_stop_trim": True, "return_hidden_states": True}.get(name, "x")
                value = False if name == "stream_reasoning" else value
                refused = await server.post(route, {**LEAST[route], name: value})
                assert (refused.status, refused.error["param"]) == (400, name)
                assert (await server.post(route, {**LEAST[route], name: None})).status == 200
        refused = await server.post(route, {**LEAST[route], "no_such_field": 1})
        assert (refused.status, refused.error["param"]) == (400, "no_such_field")


async def test_fields_that_vllms_router_adds_are_taken_where_they_ask_for_what_happens(start: Any) -> None:
    both = {
        "no_stop_trim": False,
        "return_hidden_states": False,
        "skip_special_tokens": True,
        "ignore_eos": False,
    }
    chat = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    async with start() as server:
        for route, added in (("/v1/completions", both), ("/v1/chat/completions", {**both, **chat})):
            answer = await server.post(route, {**LEAST[route], **added})
            assert answer.status == 200, answer.text
