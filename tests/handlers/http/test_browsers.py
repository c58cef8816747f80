"""A web page calls a server only where the operator has named its origin."""

from __future__ import annotations

from typing import Any

import pytest

from teneral.handlers.http.web_pages import FORM_TYPES, parse_origins
from teneral.handlers.platforms import platform_of
from teneral.loader.errors import UsageError

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
PAGE = "https://app.example.com"
JSON = {"Content-Type": "application/json"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type, authorization",
}


def allowed(answer: Any) -> str | None:
    value: str | None = answer.headers.get("Access-Control-Allow-Origin")
    return value


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "http://127.0.0.1", "nonsense"])
async def test_a_page_of_another_origin_may_send_nothing_anywhere(start: Any, origin: str) -> None:
    async with start(handler=lambda event, context: event) as server:
        for path in server.post_paths():
            answer = await server.request("POST", path, data=b"{}", headers={**JSON, "Origin": origin})
            assert answer.status == 403, path
            assert allowed(answer) is None
            asked = await server.request("OPTIONS", path, headers={**PREFLIGHT, "Origin": origin})
            assert (asked.status, allowed(asked)) == (403, None), path
        assert server.instance.engine.result().statistics().ended_total == {}


async def test_a_page_that_a_name_was_made_to_lead_here_may_not_either(start: Any) -> None:
    async with start() as server:
        port = server.address[1]
        rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        assert (await server.post("/v1/completions", BODY, headers=rebound)).status == 403
        own = {"Origin": f"http://127.0.0.1:{port}"}
        assert (await server.post("/v1/completions", BODY, headers=own)).status == 200


async def test_a_page_that_was_named_may_ask_send_and_read(start: Any) -> None:
    async with start(cors_origin=f"https://other.example, {PAGE}/", api_key="secret") as server:
        asked = await server.request("OPTIONS", "/v1/completions", headers={**PREFLIGHT, "Origin": PAGE})
        assert asked.status == 204
        assert allowed(asked) == PAGE
        assert {"POST", "DELETE"} <= set(asked.headers["Access-Control-Allow-Methods"].split(", "))
        assert asked.headers["Access-Control-Allow-Headers"] == "content-type, authorization"
        headers = {"Origin": PAGE, "Authorization": "Bearer secret"}
        answer = await server.post("/v1/completions", BODY, headers=headers)
        assert (answer.status, allowed(answer), answer.headers["Vary"]) == (200, PAGE, "Origin")
        refused = await server.post("/v1/completions", BODY, headers={"Origin": PAGE})
        assert (refused.status, allowed(refused)) == (401, PAGE)  # the page may read why
        async with server.stream("/v1/completions", BODY, headers=headers) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            await response.read()
        assert (
            await server.post("/v1/completions", BODY, headers={**headers, "Origin": "https://x.example"})
        ).status == 403
        assert allowed(await server.get("/livez", headers={"Origin": "https://x.example"})) is None


async def test_any_page_may_where_the_operator_says_so(start: Any) -> None:
    async with start(cors_origin="*") as server:
        answer = await server.post("/v1/completions", BODY, headers={"Origin": PAGE})
        assert (answer.status, allowed(answer)) == (200, PAGE)


async def test_what_is_no_page_needs_no_origin(start: Any) -> None:
    async with start() as server:
        assert (await server.post("/v1/completions", BODY)).status == 200
        assert (await server.request("OPTIONS", "/v1/completions")).status == 405


@pytest.mark.parametrize(
    "media", [*sorted(FORM_TYPES), "text/plain; charset=utf-8", "application/octet-stream"]
)
async def test_a_body_without_the_media_type_is_refused(start: Any, media: str) -> None:
    async with start(handler=lambda event, context: event) as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/invoke", "/", "/events"):
            answer = await server.request("POST", path, data=b"{}", headers={"Content-Type": media})
            assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type"), path
        if media.partition(";")[0] in FORM_TYPES:
            for path in ("/invocations", "/v2/models/tiny%2Fmodel/infer"):
                answer = await server.request("POST", path, data=b"{}", headers={"Content-Type": media})
                assert answer.status == 415, path


@pytest.mark.parametrize(
    "media", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_json_is_json_however_it_is_written(start: Any, media: str) -> None:
    async with start(handler=lambda event, context: event) as server:
        answer = await server.request("POST", "/invoke", data=b"[1]", headers={"Content-Type": media})
        assert (answer.status, answer.json) == (200, [1])
        assert (await server.client.post("/invoke")).status == 200  # no body needs no type


async def test_sagemaker_hands_over_bodies_of_every_kind(start: Any) -> None:
    async with start(handler=lambda event, context: event, platform=platform_of("sagemaker", {})) as server:
        headers = {"Content-Type": "text/plain"}
        answer = await server.request("POST", "/invocations", data=b"a text", headers=headers)
        assert answer.status == 200
        assert (await server.request("POST", "/invoke", data=b"{}", headers=headers)).status == 415


@pytest.mark.parametrize(
    "setting", ["", " , ", "app.example.com", "https://app.example.com/path", "https://a b"]
)
def test_an_origin_that_none_can_have_is_an_error(setting: str) -> None:
    with pytest.raises(UsageError, match="cors_origin"):
        parse_origins(setting)
