"""`teneral serve` as a process: started as a user starts it, spoken to over its socket, ended by signals."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
TENERAL = (sys.executable, "-m", "teneral")


class Server:
    """A server process and its port."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        program: Sequence[str] = TENERAL,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """With `variables` of a platform, the port is the platform's."""
        port = () if variables else ("--port", "0")
        self.process = subprocess.Popen(
            [*program, "serve", str(model), "--host", "127.0.0.1", *port, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(variables or {})},
        )
        assert self.process.stderr is not None
        output = ""
        while not (found := re.search(r" on http://\S+:(\d+)$", output)):
            line = self.process.stderr.readline()
            assert line, output
            output += line
        self.port = int(found[1])

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve")
    save_tiny("llama", directory / "model")
    pack(FileStore(directory / "model"), FileStore(directory / "artifact"))
    return directory / "artifact"


@pytest.fixture
def server(artifact: Path) -> Iterator[Server]:
    server = Server(artifact, "--name", "tiny")
    yield server
    server.close()


COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_a_request_sent_before_anything_is_loaded_is_answered(server: Server) -> None:
    status, data = server.ask("POST", "/v1/completions", COMPLETION)
    assert status == 200
    first = json.loads(data)
    assert first["usage"]["completion_tokens"] == 4
    status, data = server.ask("POST", "/v1/completions", COMPLETION)
    assert json.loads(data)["choices"] == first["choices"]
    assert json.loads(server.ask("GET", "/readyz")[1])["state"] == "ready"


def test_an_open_server_at_a_public_address_says_so(artifact: Path) -> None:
    for flags, address, warns in (
        ((), "127.0.0.1", False),
        (("--host", "0.0.0.0"), "0.0.0.0", True),
        (("--host", "0.0.0.0", "--api-key", "secret"), "0.0.0.0", False),
    ):
        process = subprocess.Popen(
            [*TENERAL, "serve", str(artifact), "--port", "0", *flags], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline() for _ in range(2 if warns else 1)]
            assert re.search(rf" on http://{re.escape(address)}:\d+$", lines[0]), "the bound address"
            assert not warns or "no API key" in lines[1]
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=WAIT_S)
            assert "no API key" not in rest
        finally:
            process.kill()
            process.wait()


def test_the_timeline_tells_the_whole_cold_start(server: Server) -> None:
    server.ask("POST", "/v1/completions", COMPLETION)
    snapshot = json.loads(server.ask("GET", "/timeline")[1])
    seen = {(span["lane"], span["name"]) for span in snapshot["spans"]}
    assert {("process", "port open"), ("process", "import models"), ("manifest", "open")} <= seen
    assert {lane for lane, _ in seen} >= {
        "fetch",
        "verify",
        "decode",
        "ready",
        "execute",
        "request",
        "tokenizer",
    }
    begun = {span["name"]: span["start_s"] for span in snapshot["spans"] if span["lane"] == "process"}
    first_fetch_s = min(span["start_s"] for span in snapshot["spans"] if span["lane"] == "fetch")
    answers_s = next(span["start_s"] for span in snapshot["spans"] if span["name"] == "engine runs")
    assert begun["port open"] < answers_s
    assert first_fetch_s < answers_s


def test_serving_never_imports_boto3_or_transformers_for_a_local_artifact(
    artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def handler(event, context):\n    return sorted({name.partition('.')[0] for name in sys.modules})\n"
    )
    server = Server(artifact, "--handler", f"{tmp_path}/mine.py:handler")
    try:
        status, data = server.ask("POST", "/invoke", {})
    finally:
        server.close()
    assert status == 200
    assert not {"boto3", "botocore", "transformers", "safetensors", "pandas", "scipy"} & set(json.loads(data))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_well(server: Server, number: int) -> None:
    server.ask("POST", "/v1/completions", COMPLETION)
    assert server.end(number) == 0
    assert server.process.stderr is not None
    output = server.process.stderr.read()
    assert "POST /v1/completions 200" in output
    assert "torch" not in output  # which tells of its caches at level info, when it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_meets_an_import_is_not_swallowed_by_it(
    artifact: Path, tmp_path: Path, number: int
) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time\n"
        "print('importing', file=sys.stderr, flush=True)\n"
        "for _ in range(600):\n"
        "    try:\n        time.sleep(0.1)\n"
        "    except BaseException:\n        pass\n"  # as Python does where a signal meets a clean-up
        "def handler(event, context):\n    return None\n"
    )
    flags = ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]
    flags += ["--handler", f"{tmp_path}/slow.py:handler"]
    command = [sys.executable, "-m", "teneral", "serve", str(artifact), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""


def holds_weights(process_id: int) -> bool:
    """True if the process has the memory file open that weights are loaded into."""
    try:
        files = list(Path(f"/proc/{process_id}/fd").iterdir())
        return any("teneral-weights" in os.readlink(file) for file in files)
    except OSError:
        return False  # it has ended, or the file was closed meanwhile


def test_a_server_whose_loader_is_killed_says_so_and_ends(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(artifact, tmp_path / "bucket" / "model")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    stalling = Fault(stall_after_bytes=0)
    with StoreServer(
        tmp_path, fault=lambda request: stalling if "blobs" in (request.key or "") else None
    ) as store:
        flags = ("--endpoint-url", store.url, "--region", "us-east-1", "--loader", "process")
        server = Server("s3://bucket/model", *flags)
        try:
            while not (loaders := [child for child in children(server.process.pid) if holds_weights(child)]):
                time.sleep(0.01)
            for child in loaders:
                os.kill(child, signal.SIGKILL)
            assert server.process.wait(WAIT_S) == 17
            assert server.process.stderr is not None
            output = server.process.stderr.read()
        finally:
            server.close()
    assert "killed by signal 9" in output
    assert "Traceback" not in output


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_signal_before_the_model_is_loaded_ends_the_server_too(server: Server) -> None:
    assert server.end() == 0


@pytest.mark.parametrize("name", ["nowhere", "empty", "nothing.gguf"])
def test_a_server_whose_model_is_not_there_says_so_and_ends(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "teneral", "serve", str(tmp_path / name), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 3
    assert name in ended.stderr
    for untrue in ("Traceback", "on http://", "draining"):
        assert untrue not in ended.stderr


def test_a_start_that_fails_later_drains_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # and no weights
    command = [sys.executable, "-m", "teneral", "serve", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode != 0
    assert "draining" not in ended.stderr
    assert "ready" not in ended.stderr


def test_a_start_says_once_when_the_server_is_ready(server: Server) -> None:
    while json.loads(server.ask("GET", "/readyz")[1])["state"] != "ready":
        time.sleep(0.05)
    assert server.ask("POST", "/v1/completions", COMPLETION)[0] == 200
    assert server.end() == 0
    assert server.process.stderr is not None
    log = server.process.stderr.read()
    assert len(re.findall(r"tiny is ready after \d+\.\d\d s\n", log)) == log.count("ready after") == 1


def test_requests_before_the_load_failed_get_the_error_and_are_not_cut_off(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text("{}")  # and no weights
    command = [sys.executable, "-m", "teneral", "serve", str(tmp_path / "nowhere"), "--host", "127.0.0.1"]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--name", "tiny"], stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                early = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
                break
            except ConnectionRefusedError:
                time.sleep(0.005)
        with early:
            body = json.dumps(COMPLETION)
            early.sendall(
                (
                    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}"
                ).encode()
            )
            answer = http.client.HTTPResponse(early)
            answer.begin()
            assert answer.status == 503
            assert json.loads(answer.read())["error"]["code"] == "model_unavailable"
        assert server.wait(WAIT_S) == 10
    finally:
        server.kill()
        server.communicate()
