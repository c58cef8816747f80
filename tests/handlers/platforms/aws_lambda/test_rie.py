"""Under AWS's own emulator of Lambda, `aws-lambda-rie`: the Runtime API that others wrote.

Runs where `TENERAL_TEST_RIE` names the binary; `scripts/conformance-rie` fetches it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.tiny_models import save_tiny

RIE = os.environ.get("TENERAL_TEST_RIE", "")
pytestmark = pytest.mark.skipif(
    not os.access(RIE, os.X_OK),
    reason="TENERAL_TEST_RIE names no aws-lambda-rie: run scripts/conformance-rie",
)
WAIT_S = patience_s(60)
HANDLER = """
class OutOfPaper(Exception):
    pass

def handler(event, context):
    if event == "raise":
        raise OutOfPaper("the tray is empty")
    if event == "large":
        return "x" * (7 << 20)
    if event == "context":
        return [context.request_id, context.platform["invoked_function_arn"], context.remaining_time_s()]
    if isinstance(event, dict) and "count" in event:
        return ({"n": n} for n in range(event["count"]))
    if isinstance(event, str):
        return context.model.generate(event, max_tokens=3, temperature=0, ignore_eos=True).to_dict()
    return event
"""


class Emulator:
    def __init__(self, port: int) -> None:
        self._port = port

    def invoke(self, event: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        connection.request("POST", "/2015-03-31/functions/function/invocations", json.dumps(event))
        try:
            answer = connection.getresponse().read()
        finally:
            connection.close()
        try:
            return json.loads(answer)
        except ValueError:
            return answer.decode()


@contextmanager
def emulator(folder: Path, *arguments: str) -> Iterator[Emulator]:
    port, api_port = free_port(), free_port()
    command = [
        RIE,
        "--runtime-interface-emulator-address",
        f"127.0.0.1:{port}",
        "--runtime-api-address",
        f"127.0.0.1:{api_port}",
        *(sys.executable, "-m", "teneral", "serve", *arguments),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TENERAL_"))}
    with subprocess.Popen(command, cwd=folder, env=kept, start_new_session=True) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
            yield Emulator(port)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rie")
    save_tiny("llama", folder / "model")
    (folder / "mine.py").write_text(HANDLER)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Emulator]:
    with emulator(folder, "model", "--handler", "mine.handler") as served:
        yield served


def test_events_are_answered_one_after_the_other(served: Emulator) -> None:
    assert served.invoke("hello")["usage"]["completion_tokens"] == 3
    for event in ({"a": [1, "ü", None]}, [], 5, {"text": "x" * 100_000}):
        assert served.invoke(event) == event


def test_the_context_is_the_emulators(served: Emulator) -> None:
    request_id, arn, left_s = served.invoke("context")
    assert len(request_id) == 36
    assert arn.startswith("arn:aws:lambda:")
    assert 0 < left_s <= 300


def test_an_exception_is_an_error_and_the_next_one_works(served: Emulator) -> None:
    reply = served.invoke("raise")
    assert (reply["errorType"], reply["errorMessage"]) == ("OutOfPaper", "the tray is empty")
    assert served.invoke("large")["errorType"] == "Function.ResponseSizeTooLarge"
    assert served.invoke({"still": "there"}) == {"still": "there"}


def test_a_function_urls_request_is_answered_by_the_routes(served: Emulator) -> None:
    event = {
        "version": "2.0",
        "rawPath": "/v1/models",
        "rawQueryString": "",
        "headers": {},
        "requestContext": {"http": {"method": "GET"}},
        "isBase64Encoded": False,
    }
    answer = served.invoke(event)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"])["data"][0]["id"] == "model"


def test_what_is_streamed_arrives(folder: Path) -> None:
    with emulator(folder, "model", "--handler", "mine.handler", "--lambda-streaming") as served:
        assert served.invoke({"count": 3}) == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'
        assert served.invoke({"whole": 1}) == {"whole": 1}


@pytest.mark.parametrize(
    ("model", "handler", "error_type"),
    [("nowhere", "mine.handler", "NotFoundError"), ("model", "mine.nothing", "Runtime.HandlerNotFound")],
)
def test_an_instance_that_cannot_start_reports_it(
    folder: Path, model: str, handler: str, error_type: str
) -> None:
    with emulator(folder, model, "--handler", handler) as served:
        assert served.invoke({})["errorType"] == error_type
