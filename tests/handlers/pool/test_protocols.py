"""A pool's own errors and the ends of lost streams have the shape of the requested protocol."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.pool_runs import PoolRun, pool_file
from tests.support.standby_processes import WAIT_S
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.handlers.http.errors import SERVER_ERROR, ApiError
from teneral.handlers.pool.protocols import StreamEnd

LOST = ApiError(502, "the instance ended", kind=SERVER_ERROR, code="instance_lost")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_lost_stream_of_responses_ends_with_the_next_number(size: int) -> None:
    end = StreamEnd("/v1/responses", "req_1")
    text = b'event: a\ndata: {"delta":"\\"sequence_number\\":77}","sequence_number":12}\n\n: waiting\n\n'
    for begin in range(0, len(text), size):
        end.passed(text[begin : begin + size])
    kind, _, data = end.event(LOST).partition(b"\n")
    assert kind == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "instance_lost",
        "message": "the instance ended",
        "param": None,
        "sequence_number": 13,
    }


def test_the_last_event_is_apart_from_one_that_broke_off() -> None:
    end = StreamEnd("/v1/chat/completions", "req_1")
    end.passed(b'data: {"id":')
    assert end.event(LOST).startswith(b"\n\ndata: {")
    end.passed(b" 1}\n\n")
    assert end.event(LOST).startswith(b"data: {")


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 8000},
            b"event: error\ndata: ",
        ),
        ("/v1/responses", {"input": "a b c", "max_output_tokens": 8000}, b"event: error\ndata: "),
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 8000, "ignore_eos": True}, b"data: "),
    ],
)
def test_a_stream_whose_instance_is_killed_ends_with_an_error_of_its_protocol(
    tmp_path: Path, path: str, body: dict[str, Any], end: bytes
) -> None:
    save_tiny("llama", tmp_path / "model", seed=1, max_position_embeddings=8192)
    with PoolRun(tmp_path, pool_file(f'[models.m]\nsource = "{tmp_path}/model"\n')) as pool:
        connection = http.client.HTTPConnection("127.0.0.1", pool.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            asked = {"model": "m", "temperature": 0, "stream": True, **body}
            connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read(200)
            os.kill(pool.instances("m")[0]["process"], signal.SIGKILL)
            rest = answer.read()
        event = rest.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert event.startswith(end), event
        data = json.loads(event.removeprefix(end))
        error = data if path == "/v1/responses" else data["error"]
        assert error["message"] == "the instance ended while it answered"
        assert data.get("type") == (None if path == "/v1/completions" else "error")
        if path == "/v1/responses":
            before = re.findall(rb'"sequence_number":(\d+)}', rest.removesuffix(event + b"\n\n"))
            assert (data["code"], data["sequence_number"]) == ("instance_lost", int(before[-1]) + 1)


@needs_linux
@pytest.mark.slow
def test_the_command_status_names_a_wrong_key_and_a_pool_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENERAL_API_KEY", "wrong")
    file = pool_file('[models.m]\nsource = "nowhere"\n')
    with PoolRun(tmp_path, file, environment={"TENERAL_API_KEY": "right"}) as pool:
        command = ["pool", "status", "--url", f"http://127.0.0.1:{pool.port}"]
        assert cli.run(command) == 5
        refused = capsys.readouterr().err
        assert "401" in refused
        assert "TENERAL_API_KEY" in refused
    assert cli.run(command) == 5
    assert "urlopen" not in capsys.readouterr().err


@needs_linux
@pytest.mark.slow
def test_errors_of_the_front_have_the_shape_of_the_requested_protocol(tmp_path: Path) -> None:
    with PoolRun(tmp_path, pool_file('[models.m]\nsource = "nowhere"\n')) as pool:
        messages = pool.ask("POST", "/v1/messages", {"model": "other", "messages": [], "max_tokens": 1})
        assert messages.status == 404
        assert messages.json["type"] == "error"
        assert messages.json["error"]["type"] == "not_found_error"
        assert messages.json["request_id"] == messages.headers["request-id"]
        unknown = pool.ask("GET", "/v1/models/other", headers={"Anthropic-Version": "2023-06-01"})
        assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")
        infer = pool.ask("POST", "/v2/models/other/infer", {})
        assert (infer.status, type(infer.json["error"])) == (404, str)
        rerank = pool.ask("POST", "/v2/rerank", {"model": "other", "query": "a", "documents": ["b"]})
        assert (rerank.status, rerank.json["error"]["code"]) == (404, "model_not_found")
