"""One line in the log for each request."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest

from teneral.handlers.http.logs import JsonLines


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "teneral.http.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "teneral.http.access"]


async def test_a_request_is_one_line_with_its_status_size_time_and_id(start: Any, lines: Any) -> None:
    async with start() as server:
        answer = await server.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine"}
        )
    (line,) = lines()
    assert re.fullmatch(
        rf"POST /v1/completions 200 {len(answer.body)} bytes \d+\.\d ms mine 1\+1 tokens first after \d+\.\d ms",
        line,
    )


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("parent", "is_taken"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", True),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", True),
        (f"00-{TRACE}-00f067aa0ba902b7-01-more", False),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE}", False),
    ],
)
async def test_the_callers_trace_stands_in_the_line(
    start: Any, lines: Any, parent: str, is_taken: bool
) -> None:
    async with start() as server:
        await server.get("/v1/models", headers={"traceparent": parent})
    assert lines()[0].endswith(f" trace {TRACE}") is is_taken


async def test_a_line_in_json_has_the_figures_under_their_names(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "teneral.http.access")
    async with start() as server:
        headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        await server.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True}, headers=headers
        )
    (record,) = [record for record in caplog.records if record.name == "teneral.http.access"]
    line = json.loads(JsonLines().format(record))
    assert (line["status"], line["path"], line["request_id"]) == (200, "/v1/completions", "mine")
    assert (line["prompt_tokens"], line["generated_tokens"], line["trace_id"]) == (1, 3, TRACE)
    assert 0 < line["first_token_s"] <= line["duration_s"]
    assert line["timestamp"].endswith("Z")
    assert line["level"] == "info"


def test_a_traceback_is_one_line_of_json() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "b.py", 1, "it broke", (), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ValueError: no\nway" in json.loads(text)["error"]


async def test_a_stream_is_logged_at_its_end_with_what_was_sent(start: Any, lines: Any) -> None:
    async with start() as server:
        async with server.stream("/v1/completions", {"prompt": "x", "max_tokens": 3}) as response:
            body = await response.read()
        await server.eventually(lambda: len(lines()) == 1)
    sent = re.search(r" 200 (\d+) bytes ", lines()[0])
    assert sent is not None
    assert int(sent[1]) >= len(body)


async def test_a_client_that_goes_away_is_logged_as_that(start: Any, lines: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        async with server.stream("/v1/completions", {"prompt": "x", "max_tokens": 3}) as response:
            response.close()
        await server.eventually(lambda: len(lines()) == 1)
        server.instance.model.release()
    assert " 499 " in lines()[0]


async def test_neither_probes_nor_queries_nor_line_breaks_stand_in_the_log(start: Any, lines: Any) -> None:
    async with start() as server:
        await server.get("/livez")
        await server.get("/readyz")
        await server.get("/metrics")
        await server.get("/nothing%0ahere?token=secret")
    (line,) = lines()
    assert line.startswith("GET /nothing%0Ahere 404 ")


async def test_neither_prompts_nor_answers_stand_in_the_log(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("teneral", "teneral.http.access"):  # a batch job in this process may have made it quiet
        caplog.set_level(logging.DEBUG, name)
    secret = "the patient in room seven"

    def broken(event: Any, context: Any) -> Any:
        return {"echo": event, "length": len(context.model.generate(event, max_tokens=1).text)}

    async with start(handler=broken) as server:
        body = {"prompt": secret, "max_tokens": 8, "ignore_eos": True}
        answered = (await server.post("/v1/completions", body)).json["choices"][0]["text"]
        for bad in (
            {**body, "prompt": {"text": secret}},
            {**body, "prompt": secret * 900},
            {**body, "n": secret},
        ):
            assert (await server.post("/v1/completions", bad)).status == 400
        chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 8, "ignore_eos": True}
        assert (await server.post("/v1/chat/completions", chat)).status == 200
        assert (await server.post("/invoke", secret)).status == 200
    assert "teneral.http.access" in caplog.text
    assert secret not in caplog.text
    assert len(answered) < 4 or answered not in caplog.text
