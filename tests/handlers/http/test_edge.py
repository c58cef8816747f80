"""The steps that every request passes through: ids, errors, counts. (Keys: `test_keys.py`;
deadlines: `test_deadline.py`.)
"""

from __future__ import annotations

from typing import Any

import pytest

BODY = {"prompt": "x", "max_tokens": 1}


async def test_a_reasonable_request_id_comes_back(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/livez", headers={"x-request-id": "trace-01.A:b/c"})
        assert answer.headers["x-request-id"] == "trace-01.A:b/c"


@pytest.mark.parametrize("given", [None, "", "has space", "é", "x" * 129, "semi;colon"])
async def test_any_other_request_id_is_replaced_by_a_fresh_one(start: Any, given: str | None) -> None:
    async with start() as server:
        headers = {} if given is None else {"x-request-id": given}
        ids = {(await server.get("/livez", headers=headers)).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        assert all(fresh.startswith("req_") for fresh in ids)


async def test_every_answer_says_how_long_it_took(start: Any) -> None:
    async with start() as server:
        for answer in (await server.post("/v1/completions", BODY), await server.get("/nowhere")):
            assert int(answer.headers["openai-processing-ms"]) >= 0


async def test_an_unknown_route_is_an_openai_error(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/v1/nothing")
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")


async def test_a_wrong_method_says_which_is_right(start: Any) -> None:
    async with start() as server:
        answer = await server.get("/v1/completions")
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["Allow"] == "POST"


async def test_another_model_is_not_found(start: Any) -> None:
    async with start() as server:
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            answer = await server.post(path, {**body, "model": "gpt-5"})
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_a_body_that_is_no_request_is_refused(start: Any, body: bytes) -> None:
    async with start() as server:
        answer = await server.request("POST", "/v1/completions", data=body)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


async def test_a_bug_of_ours_tells_the_client_nothing_but_its_id(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as server:
        server.instance.timeline.snapshot = lambda: 1 / 0
        answer = await server.get("/timeline")
        assert answer.status == 500
        assert "ZeroDivision" not in answer.error["message"]
        assert answer.headers["x-request-id"] in caplog.text
        assert "ZeroDivisionError" in caplog.text
