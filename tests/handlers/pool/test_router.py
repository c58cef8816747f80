"""vLLM's router, which we did not write, in front of real servers and of a real pool.

It has an environment of its own, which scripts/conformance-router makes; TENERAL_ROUTER names its program. Elsewhere
these tests are skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.pool_runs import Answer, PoolRun
from tests.support.ports import free_port
from tests.support.standby_processes import WAIT_S, until
from tests.support.tiny_models import save_tiny

from teneral import cli

ROUTER = os.environ.get("TENERAL_ROUTER", "")
NUM_SESSIONS = 100
pytestmark = [
    pytest.mark.skipif(not ROUTER, reason="needs vllm-router: run scripts/conformance-router"),
    pytest.mark.skipif(sys.platform != "linux", reason="pools need Linux"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("router")
    save_tiny("llama", folder / "plain")
    assert cli.run(["pack", str(folder / "plain"), str(folder / "packed"), "--quiet"]) == 0
    return folder / "packed"


class Router:
    """The router as a process, and requests through it."""

    def __init__(self, folder: Path, workers: list[str], *flags: str) -> None:
        self.port = free_port()
        command = [ROUTER, "--port", str(self.port), "--prometheus-port", str(free_port())]
        command += ["--worker-urls", *workers, "--worker-startup-check-interval", "1", *flags]
        self._log = folder / "router.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Router:
        until(self._is_ready, "the router has found its servers")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(patience_s(10))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")
        with contextlib.suppress(OSError):
            return self.ask("GET", "/readiness").status == 200
        return False

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json", **named})
            answer = connection.getresponse()
            return Answer(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())

    def complete(self, session: str = "", **more: Any) -> Answer:
        body = {"model": "m", "prompt": "a b c", "max_tokens": 4, "temperature": 0, **more}
        headers = {"x_session_id": session} if session else {}
        return self.ask("POST", "/v1/completions", body, **headers)


@contextlib.contextmanager
def servers(model: Path, count: int) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """`teneral serve` this many times: URL and process of each, when the router may ask them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENERAL_")}
    running = []
    try:
        for _ in range(count):
            port = free_port()
            command = [
                sys.executable,
                "-m",
                "teneral",
                "serve",
                str(model),
                "--name",
                "m",
                "--port",
                str(port),
            ]
            command += ["--kv-bytes", "8MiB", "--threads", "1"]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
            running.append((f"http://127.0.0.1:{port}", process))
        yield running
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait(WAIT_S)


def num_requests(url: str) -> float:
    """Completions that a server has answered."""
    host, _, port = url.rpartition("/")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    found = [line for line in lines if line.startswith("teneral_requests_total{") and "completions" in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_sessions_stay_with_their_server(model: Path, tmp_path: Path) -> None:
    with (
        servers(model, 2) as running,
        Router(tmp_path, [url for url, _ in running], "--policy", "consistent_hash") as router,
    ):
        counts: list[list[float]] = []
        for number in range(NUM_SESSIONS):
            before = [num_requests(url) for url, _ in running]
            for _ in range(3):
                answer = router.complete(f"session-{number}")
                assert answer.status == 200, answer.body
            counts.append([num_requests(url) - old for (url, _), old in zip(running, before, strict=True)])
        print(f"{NUM_SESSIONS} sessions by server:", Counter(each.index(max(each)) for each in counts))
        assert all(sorted(each) == [0, 3] for each in counts), "each session's three requests met one server"


def test_a_stream_comes_through_whole(model: Path, tmp_path: Path) -> None:
    with servers(model, 1) as running, Router(tmp_path, [running[0][0]]) as router:
        whole = router.complete()
        streamed = router.complete(stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        pieces = [line[6:] for line in streamed.body.split(b"\n") if line.startswith(b"data: {")]
        assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == whole.text
        listed = router.ask("GET", "/v1/models")
        assert [each["id"] for each in listed.json["data"]] == ["m"]


def test_a_server_that_ends_is_left_out(model: Path, tmp_path: Path) -> None:
    flags = (
        "--policy",
        "round_robin",
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
    )
    with servers(model, 2) as running, Router(tmp_path, [url for url, _ in running], *flags) as router:
        assert {router.complete().status for _ in range(6)} == {200}
        running[0][1].kill()
        until(lambda: all(router.complete().status == 200 for _ in range(10)), "the other one answers all")


def test_a_pool_that_sleeps_is_a_server_like_any_other(model: Path, tmp_path: Path) -> None:
    """The router sends /tokenize before each completion, and another route that a pool does not have; it waits a second
    for each. Thus the number of requests that wait for a start depends on the machine; that of starts does not.
    """
    file = (
        'version = 1\n[defaults.serve]\nkv_bytes = "8MiB"\nthreads = 1\n'
        f'[models.m]\nsource = "{model}"\n[node]\nmemory = "4GiB"\nstandby = 1\n'
    )
    with (
        PoolRun(tmp_path, file, "--model-control") as pool,
        Router(tmp_path, [f"http://127.0.0.1:{pool.port}"]) as router,
    ):
        assert not pool.instances("m"), "the router accepts it without an instance"
        cold = router.complete()
        assert cold.status == 200, cold.body
        assert pool.ask("POST", "/v1/pool/m/sleep").status == 200
        until(lambda: pool.pool()["models"]["m"]["state"] == "asleep", "the model ends")
        began_s = time.monotonic()
        again = router.complete(stream=True)
        print(f"woken through the router: {time.monotonic() - began_s:.2f} s")
        assert again.body.endswith(b"data: [DONE]\n\n")
        assert sum(pool.pool()["counts"]["starts"].values()) == 2
