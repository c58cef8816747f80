"""`teneral serve` as platforms start it: what they set, what they ask, and how they end it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.tiny_models import save_tiny

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
COMPLETION = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
# The command itself, except that its image is here: /opt/ml is not ours to write to.
SERVE_WITH_FOLDER = """
import sys
from teneral.handlers import platforms
folder = sys.argv.pop(1)
platforms.PLATFORMS = tuple(
    row._replace(model_folder=folder) if row.model_folder else row for row in platforms.PLATFORMS
)
from teneral.__main__ import main
raise SystemExit(main())
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("platforms")
    save_tiny("llama", directory / "model")
    pack(FileStore(directory / "model"), FileStore(directory / "artifact"))
    return directory / "artifact"


def next_line_with_address(process: subprocess.Popen[str]) -> str:
    """The next line that is none of the log's."""
    assert process.stderr is not None
    while re.match(r"\d{4}-\d\d-\d\d ", line := process.stderr.readline()):
        pass
    return line


@contextmanager
def serving(command: list[str], **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and what it says until its ports are open."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TENERAL_HOST": "127.0.0.1", **variables},
    )
    assert process.stderr is not None
    try:
        yield process, next_line_with_address(process)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_sagemaker_starts_it_with_serve_and_nothing_else(artifact: Path) -> None:
    port = free_port()
    command = ["-c", SERVE_WITH_FOLDER, str(artifact), "serve"]
    with serving(command, SAGEMAKER_BIND_TO_PORT=str(port)) as (process, first_line):
        assert first_line.strip().endswith(f":{port}")
        assert ask(port, "GET", "/ping")[0] in (200, 503)
        status, body = ask(port, "POST", "/invocations", COMPLETION)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
        assert ask(port, "GET", "/ping") == (200, b"")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert "25 s" in process.stderr.read()  # of the 30 that SageMaker gives


def test_a_stream_goes_on_to_its_end_after_sagemakers_sigterm(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\n"
        "def handler(event, context):\n"
        "    yield 'begun'\n"
        "    while not pathlib.Path(event).exists():\n"
        "        time.sleep(0.01)\n"
        "    yield 'ended'\n"
    )
    port = free_port()
    with serving(
        ["-m", "teneral", "serve", str(artifact), "--handler", f"{tmp_path}/mine.py:handler"],
        TENERAL_PLATFORM="sagemaker",
        TENERAL_PORT=str(port),
    ) as (process, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        connection.request("POST", "/invocations", json.dumps(str(tmp_path / "end")))
        response = connection.getresponse()
        assert response.readline() == b'"begun"\n'
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert any("draining: 1 requests in progress" in line for line in iter(process.stderr.readline, ""))
        assert ask(port, "GET", "/ping")[0] == 503
        (tmp_path / "end").touch()
        assert response.read() == b'"ended"\n'
        connection.close()
        assert process.wait(WAIT_S) == 0


def test_cloud_run_says_which_port_and_sends_events(artifact: Path) -> None:
    port = free_port()
    with serving(["-m", "teneral", "serve", str(artifact)], PORT=str(port), K_SERVICE="summaries") as (
        process,
        first_line,
    ):
        assert first_line.strip().endswith(f":{port}")
        event = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": COMPLETION}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        headers = {"Content-Type": "application/cloudevents+json"}
        connection.request("POST", "/", json.dumps(event), headers)
        response = connection.getresponse()
        reply = json.loads(response.read())
        connection.close()
        assert (response.status, reply["type"]) == (200, "t.reply")
        assert reply["data"]["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_runpods_load_balancer_asks_another_port_how_it_is(artifact: Path) -> None:
    port, health_port = free_port(), free_port()
    with serving(
        ["-m", "teneral", "serve", str(artifact), "--api-key", "secret-key-of-mine"],
        PORT=str(port),
        PORT_HEALTH=str(health_port),
        RUNPOD_ENDPOINT_ID="endpoint",
    ) as (process, _):
        assert process.stderr is not None
        assert re.search(rf"\b{health_port}$", next_line_with_address(process).strip())
        assert ask(health_port, "GET", "/ping")[0] in (200, 204)
        assert ask(port, "GET", "/ping")[0] in (200, 204)
        assert ask(health_port, "GET", "/metrics")[0] == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_worker_of_a_queue_says_what_it_lacks(artifact: Path) -> None:
    command = [sys.executable, "-m", "teneral", "serve", str(artifact), "--platform", "runpod-queue"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert "RUNPOD_WEBHOOK_GET_JOB" in done.stderr
