"""`docker-compose.yml`: what it locks down and mounts, and its commands, run on this machine with a real store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.load import patience_s
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROMETHEUS = yaml.safe_load((ROOT / "infra" / "compose" / "prometheus.yml").read_text())
TARGETS = {job["job_name"]: job["static_configs"][0]["targets"][0] for job in PROMETHEUS["scrape_configs"]}


def mounts(name: str) -> dict[str, str]:
    """Paths in the container → paths in the checkout; a variable has its default."""
    found = {}
    for volume in SERVICES[name].get("volumes", ()):
        source, target, mode = volume.replace("${MODEL:-./demo/model}", "./demo/model").split(":")
        assert mode == "ro"
        found[target] = source
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_is_root_writes_elsewhere_or_listens_beyond_this_machine(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert "build" in service or service["image"].partition(":")[2].removeprefix("v")[0].isdigit()


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_in_the_checkout(name: str) -> None:
    for path in mounts(name).values():
        assert (ROOT / path).exists(), path


def test_prometheus_and_grafana_read_what_is_mounted() -> None:
    flags = dict(flag.split("=") for flag in SERVICES["prometheus"]["command"])
    assert {flags["--config.file"], *PROMETHEUS["rule_files"]} == set(mounts("prometheus"))
    assert SERVICES["prometheus"]["tmpfs"][0].startswith(f"{flags['--storage.tsdb.path']}:")
    files = {path: name for path, name in mounts("grafana").items() if name.endswith(".yml")}
    datasource, provider = (yaml.safe_load((ROOT / name).read_text()) for name in files.values())
    assert urllib.parse.urlsplit(datasource["datasources"][0]["url"]).netloc == "prometheus:9090"
    assert provider["providers"][0]["options"]["path"] in mounts("grafana")
    assert {Path(path).parent.name for path in files} == {"datasources", "dashboards"}


def started(name: str, store_port: int, *more: str) -> subprocess.Popen[bytes]:
    """A service's process as a container has it, but for paths, the store's address, and `more`."""
    service = SERVICES[name]
    store = f"127.0.0.1:{store_port}"
    program = {"store": [sys.executable, "-m", "moto.server"]}.get(name, ["teneral"])
    words = [*service.get("entrypoint", program), *service["command"], *more]
    for there, here in mounts(name).items():
        words = [re.sub(rf"(?<!\S){there}(?!\S)", str(ROOT / here), word) for word in words]
    variables = service.get("environment", {})
    given = {key: value.replace("store:5000", store) for key, value in variables.items()}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TENERAL_", "AWS_"))}
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    return subprocess.Popen(
        words, env={**inherited, "PATH": path, "OMP_NUM_THREADS": "1", **given}, stderr=subprocess.DEVNULL
    )


def answer(url: str, body: bytes | None = None, host: str = "localhost") -> bytes:
    """The body of the first answer, once there is one."""
    until_s = time.monotonic() + patience_s(60)
    while True:
        request = urllib.request.Request(url, body, {"content-type": "application/json", "host": host})
        try:
            with urllib.request.urlopen(request, timeout=patience_s(60)) as response:
                return bytes(response.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < until_s, url
            time.sleep(0.1)


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """Of the services that are scraped, once they run."""
    store_port, processes, found = free_port(), [], {}
    try:
        processes.append(started("store", store_port, "--port", str(store_port)))
        answer(f"http://127.0.0.1:{store_port}/moto-api/")
        assert started("pack", store_port).wait(patience_s(120)) == 0
        for name in TARGETS:
            found[name] = free_port()
            processes.append(started(name, store_port, "--port", str(found[name])))
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(patience_s(60))


@pytest.mark.timeout(400)
def test_the_server_and_the_pool_answer_from_the_store_and_to_prometheus(ports: dict[str, int]) -> None:
    body = b'{"prompt": "def add", "max_tokens": 4}'
    for name, target in TARGETS.items():
        assert target == f"{name}:8080"
        assert f":{target.rpartition(':')[2]}" in SERVICES[name]["ports"][0]
        address = f"http://127.0.0.1:{ports[name]}"
        assert b'"choices"' in answer(f"{address}/v1/completions", body)
        assert b"teneral_requests_total" in answer(f"{address}/metrics", host=target)
