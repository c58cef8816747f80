"""docs/deploy/ray.md and kuberay.md as a new user follows them, under a real Ray with its dashboard: the model is
packed into a store, nodes start with the rendered command lines, the rendered configuration is deployed, the pages'
requests are answered. KubeRay's operator is played here: it makes a command line of a group's `rayStartParams` and
sizes, behind the container's own command. `scripts/conformance-ray`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray", reason="needs Ray: scripts/conformance-ray")

from tests.infra.test_deploy_pages import DOCS, blocks, commands  # noqa: E402
from tests.support.aws_environment import use_test_credentials  # noqa: E402
from tests.support.ray_environment import leave_out_test_settings  # noqa: E402
from tests.support.store_server import StoreServer  # noqa: E402
from tests.support.tiny_models import save_tiny  # noqa: E402

from teneral.cli import run  # noqa: E402
from teneral.infra.render.ray import POD_STANDBY_SOCKET, STANDBY_SOCKET  # noqa: E402

WAIT_S = 240.0
GIB = 1 << 30
pytestmark = pytest.mark.timeout(900)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]


class Cluster:
    """Nodes of one Ray on this machine, each a process group that ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.gcs, self.dashboard, self.serve, self.client = free_ports(4)
        self.agents: list[int] = []
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, command: list[str]) -> None:
        log = (self._folder / f"process-{len(self._processes)}.log").open("wb")
        with log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    def start_node(self, *flags: str, head: bool, before: str = "") -> None:
        """`ray start` as a container runs it: at the end of a shell's command line."""
        (agent,) = free_ports(1)
        self.agents.append(agent)
        where = [f"--address=127.0.0.1:{self.gcs}"]
        if head:
            where = ["--head", f"--port={self.gcs}", f"--ray-client-server-port={self.client}"]
            where += [f"--dashboard-port={self.dashboard}", f"--temp-dir={self._folder / 'r'}"]
        own = [f"--dashboard-agent-listen-port={agent}", f"--object-store-memory={100 << 20}"]
        line = f"{sys.executable} -m ray.scripts.scripts start {' '.join([*where, *flags, *own])} --block"
        self.spawn(["/bin/bash", "-c", "--", f"{before} && {line}" if before else line])

    def ask(self, port: int, path: str, body: Any = None, method: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        with contextlib.closing(connection):
            data = None if body is None else body if isinstance(body, str) else json.dumps(body)
            method = method or ("GET" if data is None else "POST")
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def wait_for(self, port: int, path: str) -> None:
        deadline = time.monotonic() + WAIT_S
        status: Any = None
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, _ = self.ask(port, path)
                if status == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(f"{path} at {port}: {status}\n{self.logs()}")

    def wait_until_running(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            found = json.loads(self.ask(self.dashboard, "/api/serve/applications/")[1])["applications"]
            if found and all(each["status"] == "RUNNING" for each in found.values()):
                return found
            time.sleep(0.5)
        raise AssertionError({name: (each["status"], each["message"]) for name, each in found.items()})

    def logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in self._folder.glob("process-*.log")
        )

    def end(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    folder = Path(tmp_path_factory.mktemp("r"))
    use_test_credentials(monkeypatch)
    leave_out_test_settings()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # these nodes ask for no token
    monkeypatch.chdir(folder)
    save_tiny("llama", folder / "my-model")
    (folder / "buckets" / "my-models").mkdir(parents=True)
    found = Cluster(folder)
    with StoreServer(folder / "buckets") as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url)
        try:
            yield found
        finally:
            found.end()


def follow(page: str) -> tuple[Any, list[list[str]]]:
    """Packs and renders with the page's commands; gives the document, and the page's requests."""
    path = DOCS / "deploy" / f"{page}.md"
    Path("pool.toml").write_text(blocks(path, "toml")[0])
    for words in commands(path):
        if words[0] == "teneral" and words[1] != "standby":
            assert run(words[1:]) == 0
    (rendered,) = Path("rendered").glob("*.yaml")
    requests = [words for words in commands(path) if words[0] == "curl"]
    return yaml.safe_load(rendered.read_text()), requests


def check_requests(cluster: Cluster, requests: list[list[str]]) -> None:
    assert requests
    for words in requests:
        path = urllib.parse.urlsplit(words[1]).path
        body = words[words.index("-d") + 1] if "-d" in words else None
        began = time.monotonic()
        status, data = cluster.ask(cluster.serve, path, body)
        print(f"{path}: {time.monotonic() - began:.2f} s")
        assert status == 200, data
        assert not (body and json.loads(body).get("stream")) or data.endswith(b"data: [DONE]\n\n")


def test_the_page_of_ray_serve(cluster: Cluster) -> None:
    config, requests = follow("ray")
    standby = next(
        words for words in commands(DOCS / "deploy" / "ray.md") if words[:2] == ["teneral", "standby"]
    )
    path = str(Path.cwd() / "s.sock")
    cluster.spawn([sys.executable, "-m", *[path if word == STANDBY_SOCKET else word for word in standby]])
    cluster.start_node("--num-cpus=2", f"--memory={8 * GIB}", head=True)
    cluster.wait_for(cluster.dashboard, "/api/gcs_healthz")
    config["http_options"] |= {"host": "127.0.0.1", "port": cluster.serve}
    text = yaml.safe_dump(config).replace(STANDBY_SOCKET, path)
    Path("rendered/serve.yaml").write_text(text)
    for command in (["deploy", "rendered/serve.yaml"], ["status"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ray.serve.scripts",
                *command,
                "-a",
                f"http://127.0.0.1:{cluster.dashboard}",
            ],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    cluster.wait_until_running()
    check_requests(cluster, requests)


@pytest.mark.parametrize("sleeps", [False, True], ids=["page", "sleeping"])
def test_the_page_of_kuberay(cluster: Cluster, sleeps: bool) -> None:
    service, requests = follow("kuberay")
    if sleeps:
        text = Path("pool.toml").read_text().replace("min_warm = 1", "min_warm = 0")
        Path("pool.toml").write_text(text + '\n[node]\nstandby = 1\nstandby_memory = "64MiB"\n')
        assert run(["pool", "render", "kuberay", "pool.toml", "-o", "rendered"]) == 0
        service = yaml.safe_load(Path("rendered/rayservice.yaml").read_text())
    spec = service["spec"]["rayClusterConfig"]
    head, (group,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    cluster.start_node(*(f"--{name}={value}" for name, value in head["rayStartParams"].items()), head=True)
    cluster.wait_for(cluster.dashboard, head_probe(head, "readinessProbe"))
    limits = container["resources"]["limits"]
    memory = int(limits["memory"].removesuffix("Mi").removesuffix("Gi"))
    flags = {
        "num-cpus": limits["cpu"],
        "memory": memory * (GIB if limits["memory"].endswith("Gi") else 1 << 20),
        **group["rayStartParams"],
    }
    socket_path = str(Path.cwd() / "s.sock")
    before = " ".join(container.get("command", [])).replace(POD_STANDBY_SOCKET, socket_path)
    before = before.replace("teneral ", f"{sys.executable} -m teneral ", 1)
    assert bool(before) == sleeps
    cluster.start_node(*(f"--{name}={value}" for name, value in flags.items()), head=False, before=before)
    for agent in cluster.agents:
        cluster.wait_for(agent, head_probe(head, "livenessProbe"))
    config = yaml.safe_load(service["spec"]["serveConfigV2"].replace(POD_STANDBY_SOCKET, socket_path))
    # One machine has one address, and so one proxy.
    config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": cluster.serve}}
    status, data = cluster.ask(cluster.dashboard, "/api/serve/applications/", config, "PUT")
    assert status == 200, data
    found = cluster.wait_until_running()
    cluster.wait_for(cluster.serve, container["readinessProbe"]["httpGet"]["path"])
    nodes = {
        deployment["name"]: {replica["node_id"] for replica in deployment["replicas"]}
        for application in found.values()
        for deployment in application["deployments"].values()
    }
    assert len(nodes["Replica"]) == 1  # the worker, which alone has the resource
    check_requests(cluster, requests)


def head_probe(group: dict[str, Any], name: str) -> str:
    (container,) = group["template"]["spec"]["containers"]
    path: str = container[name]["httpGet"]["path"]
    return path
