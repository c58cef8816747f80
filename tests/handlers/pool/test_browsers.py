"""A web page calls a pool only from the pool's own address, or from an origin that a model's settings name."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from tests.support.pool_runs import PoolRun
from tests.support.tiny_models import save_tiny

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]
PAGE = "https://app.example.com"
FILE = """
version = 1
[defaults.serve]
kv_bytes = "8MiB"
threads = 1
[models.open]
source = "model"
[models.open.serve]
cors_origin = "https://app.example.com"
[models.closed]
source = "model"
[node]
memory = "8GiB"
"""


def test_pages_of_other_origins_may_send_nothing_and_start_nothing(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    with PoolRun(tmp_path, FILE, "--model-control") as run:
        foreign = {"origin": "https://evil.example"}
        rebound = {"host": f"evil.example:{run.port}", "origin": f"http://evil.example:{run.port}"}
        for headers in (foreign, rebound):
            for path in ("/v1/pool/open/drain", "/v1/pool/open/wake", "/v1/completions", "/invoke"):
                refused = run.ask("POST", path, {"model": "open", "prompt": "a"}, headers)
                assert refused.status == 403, path
                assert refused.json["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
            for path in ("/v1/pool", "/v1/models", "/metrics"):
                assert run.ask("GET", path, headers=headers).status == 403, path
        assert {model["state"] for model in run.pool()["models"].values()} == {"asleep"}
        own = {"origin": f"http://127.0.0.1:{run.port}"}
        assert run.ask("GET", "/v1/pool", headers=own).status == 200

        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        preflight = run.ask("OPTIONS", "/v1/completions", headers=asked)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, PAGE)
        for path, methods in (("/v1/completions", "POST"), ("/v1/models", "GET,HEAD"), ("/invoke", "POST")):
            refused = run.ask("OPTIONS", path, headers={"x-teneral-model": "closed"})
            assert (refused.status, refused.headers["allow"]) == (405, methods), path
        assert {model["state"] for model in run.pool()["models"].values()} == {"asleep"}
        answer = run.complete("open", headers={"origin": PAGE})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert run.complete("closed", headers={"origin": PAGE}).status == 403, "its instance refuses"


def test_a_page_whose_name_was_led_here_reads_nothing_of_the_pool(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    file = FILE.replace("threads = 1\n", 'threads = 1\nallowed_hosts = "pool.example"\n')
    paths = (
        "/",
        "/livez",
        "/readyz",
        "/metrics",
        "/v1/pool",
        "/v1/models",
        "/openapi.json",
        "/timeline",
        "/debug/kv",
    )
    with PoolRun(tmp_path, FILE) as run:
        for path in (*paths, "/timeline/events", "/there-is-no-such-path"):
            refused = run.ask("GET", path, headers={"host": f"evil.example:{run.port}"})
            assert (refused.status, refused.json["error"]["code"]) == (403, "host_not_allowed"), path
        assert {model["state"] for model in run.pool()["models"].values()} == {"asleep"}
        for host in (f"127.0.0.1:{run.port}", "localhost", "pool:8080"):
            assert run.ask("GET", "/v1/pool", headers={"host": host}).status == 200, host
        assert run.ask("GET", "/v1/pool", headers={"host": "pool.example"}).status == 403
    with PoolRun(tmp_path, file) as run:
        assert run.ask("GET", "/v1/pool", headers={"host": "pool.example"}).status == 200
        assert run.ask("GET", "/v1/pool", headers={"host": "evil.example"}).status == 403


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with PoolRun(tmp_path, FILE) as run, socket.create_connection(("127.0.0.1", run.port), 20) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        client.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"Server: teneral" in answer
