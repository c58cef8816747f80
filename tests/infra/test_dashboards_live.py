"""Dashboards over a real Prometheus that scrapes a real pool: each panel has data (`scripts/conformance-infra`)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.pool_runs import PoolRun

ROOT = Path(__file__).parents[2]
PROMETHEUS = os.environ.get("TENERAL_TEST_PROMETHEUS", "")
POOL = f"""
version = 1
[models.demo]
source = "{ROOT / "demo" / "model"}"
max_instances = 1
[models.demo.serve]
adapters = "{ROOT / "demo" / "no-adapters"}/{{name}}"
[node]
memory = "3GiB"
"""
# These series begin with the first eviction, and the first copy.
EVENTS = {"Evictions", "Copies to shadows"}
pytestmark = [
    pytest.mark.skipif(not PROMETHEUS, reason="needs prometheus: scripts/conformance-infra"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, free_port: int) -> Iterator[str]:
    """Its address, once it has scraped a pool and its instance under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    with PoolRun(folder, POOL) as pool:
        _load(pool)
        jobs = [("pool", pool.port, "/metrics"), ("server", _instance_port(pool), "/metrics")]
        scrapes = "".join(
            f"  - job_name: {name}\n    metrics_path: {path}\n    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
            for name, port, path in jobs
        )
        (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs:\n{scrapes}")
        arguments = [
            PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{free_port}", "--log.level=error",
        ]  # fmt: skip
        process = subprocess.Popen(arguments)
        address = f"http://127.0.0.1:{free_port}"
        try:
            until_s = time.monotonic() + patience_s(60)
            while len(_query(address, "count_over_time(up[1m]) > 3")) < len(jobs):
                assert time.monotonic() < until_s
                _load(pool)
            yield address
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _load(pool: PoolRun) -> None:
    for number in range(4):
        body = {"model": "demo", "prompt": f"def f{number}", "max_tokens": 8, "stream": number % 2 == 0}
        assert pool.ask("POST", "/v1/completions", body).status == 200
    time.sleep(0.5)


def _instance_port(pool: PoolRun) -> int:
    (instance,) = pool.instances("demo")
    return int(urllib.parse.urlsplit(instance["url"]).port or 0)


def _query(address: str, expression: str) -> list[Any]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            found: list[Any] = json.load(response)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
    return found


@pytest.mark.parametrize(("dashboard", "job"), [("teneral", "server"), ("pool", "pool")])
def test_every_panel_has_data(prometheus: str, dashboard: str, job: str) -> None:
    panels = json.loads((ROOT / "infra" / "dashboards" / f"{dashboard}.json").read_text())["panels"]
    empty = []
    for panel in panels:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$job", job).replace("$__rate_interval", "1m")
            if not _query(prometheus, expression) and panel["title"] not in EVENTS:
                empty.append((panel["title"], expression))
    assert not empty
