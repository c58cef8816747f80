"""Each page of docs/deploy as a new user follows it, up to the cloud: its model is packed into a store, its file is
rendered, and `teneral serve` is started as the platform would start the rendered container. It has the container's
arguments and variables and nothing else, its probes pass, the page's own requests are answered, and SIGTERM ends it
within the platform's time.

With `scripts/conformance-image` it is the built image, read-only and as its user; else the program itself. The pages
of Ray are followed by `scripts/conformance-ray`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.infra.test_deploy_pages import DOCS, blocks, commands
from tests.infra.test_image import BUILT, free_port, process_1, start
from tests.support.aws_environment import use_test_credentials
from tests.support.fake_runtime_api import FakeRuntimeApi
from tests.support.gs_server import GsServer
from tests.support.load import patience_s
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.infra.render.render import RENDERERS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "infra" / "helm" / "teneral"
HELM = os.environ.get("TENERAL_TEST_HELM", "")
KEY = "my-key"  # that the pages put into the platform's store of secrets
WAIT_S = patience_s(60)
LAMBDA_GRACE_S, SAGEMAKER_GRACE_S, CLOUD_RUN_GRACE_S = 2, 30, 10


class Container(NamedTuple):
    """One rendered container: what the platform starts it with, and what it asks it."""

    arguments: list[str]
    variables: dict[str, str]
    secrets: set[str]
    alive: str
    ready: str
    grace_s: float


def of_pod(container: Mapping[str, Any], grace_s: float, **platforms: str) -> Container:
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    secrets = {each["name"] for each in container["env"] if "valueFrom" in each}
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    ready = probes.get("readinessProbe") or probes["startupProbe"]
    variables |= dict.fromkeys(secrets, KEY) | platforms
    return Container(container["args"], variables, secrets, probes["livenessProbe"], ready, grace_s)


def of_knative(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        if each["kind"] == "Service":
            spec = each["spec"]["template"]["spec"]
            yield of_pod(spec["containers"][0], spec["timeoutSeconds"], K_SERVICE="chat")


def of_kserve(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        if each["kind"] == "InferenceService":
            predictor = each["spec"]["predictor"]
            yield of_pod(predictor["containers"][0], predictor["timeout"], K_SERVICE="chat")


def of_deployments(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        if each["kind"] == "Deployment":
            spec = each["spec"]["template"]["spec"]
            yield of_pod(spec["containers"][0], spec["terminationGracePeriodSeconds"])


def of_chart(documents: list[dict[str, Any]]) -> Iterator[Container]:
    if not HELM:
        pytest.skip("needs helm: scripts/conformance-infra")
    command = [HELM, "template", "models", str(CHART), "-f", "-"]
    made = subprocess.run(
        command, input=json.dumps(documents[0]), capture_output=True, text=True, timeout=60, check=True
    )
    yield from of_deployments([each for each in yaml.safe_load_all(made.stdout) if each])


def of_cloud_run(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        yield of_pod(each["spec"]["template"]["spec"]["containers"][0], CLOUD_RUN_GRACE_S, K_SERVICE="chat")


def of_fargate(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        task = each["Resources"]["Task"]["Properties"]["ContainerDefinitions"][0]
        secrets = {one["Name"] for one in task.get("Secrets", ())}
        variables = {one["Name"]: one["Value"] for one in task["Environment"]} | dict.fromkeys(secrets, KEY)
        ready = each["Resources"]["Targets"]["Properties"]["HealthCheckPath"]
        yield Container(task["Command"], variables, secrets, "/livez", ready, task["StopTimeout"])


def of_sagemaker(documents: list[dict[str, Any]]) -> Iterator[Container]:
    for each in documents:
        container = each["Resources"]["Component"]["Properties"]["Specification"]["Container"]
        yield Container(["serve"], container["Environment"], set(), "/livez", "/ping", SAGEMAKER_GRACE_S)


CONTAINERS = {
    "knative": of_knative,
    "kserve": of_kserve,
    "kubernetes": of_deployments,
    "helm": of_chart,
    "cloud-run": of_cloud_run,
    "fargate": of_fargate,
    "sagemaker": of_sagemaker,
}


def of_page(platform: str) -> Path:
    return DOCS / "deploy" / f"{platform}.md"


def requests_of(page: Path) -> Iterator[tuple[str, str, dict[str, str], str | None]]:
    """Method, path, headers and body of each request of a page."""
    for words in commands(page):
        flags = {word: words[number + 1] for number, word in enumerate(words[:-1]) if word.startswith("-")}
        if words[0] == "curl":
            path = urllib.parse.urlsplit(words[1]).path
            pairs = (words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
            body = flags.get("-d")
            yield (
                "GET" if body is None else "POST",
                path,
                {name.lower(): value for name, value in pairs},
                body,
            )
        elif words[1:3] == ["sagemaker-runtime", "invoke-endpoint"]:
            yield "POST", "/invocations", {"content-type": flags["--content-type"]}, flags["--body"]


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Follows a page's commands up to the rendered files, in a folder that has a user's models; gives the documents."""
    use_test_credentials(monkeypatch)
    monkeypatch.chdir(tmp_path)
    save_tiny("llama", tmp_path / "my-model")
    save_tiny("bert", tmp_path / "my-encoder")
    (tmp_path / "buckets" / "my-models").mkdir(parents=True)
    with StoreServer(tmp_path / "buckets") as store, GsServer() as cloud_storage:
        cloud_storage.objects["my-project-models"] = {}
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url)
        monkeypatch.setenv("GCE_METADATA_HOST", cloud_storage.host)

        def follow(platform: str) -> list[dict[str, Any]]:
            (tmp_path / "pool.toml").write_text(blocks(of_page(platform), "toml")[0])
            for words in commands(of_page(platform)):
                if words[0] == "teneral":
                    gs = ["--endpoint-url", cloud_storage.url] if "gs://" in " ".join(words) else []
                    run = [sys.executable, "-m", *words, *gs]
                    done = subprocess.run(run, capture_output=True, text=True, timeout=WAIT_S, check=False)
                    assert done.returncode == 0, f"{words}: {done.stderr}"
            if platform == "cloud-run":
                monkeypatch.setenv("TENERAL_ENDPOINT_URL", cloud_storage.url)
            return [
                yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "rendered").glob("*.yaml"))
            ]

        yield follow


@contextmanager
def started(
    arguments: list[str], variables: Mapping[str, str], image: str = "server"
) -> Iterator[tuple[Any, int]]:
    """The process that a test waits for, and the one that gets signals."""
    outside = ("AWS_", "GCE_", "TENERAL_ENDPOINT_URL")
    given = {name: value for name, value in os.environ.items() if name.startswith(outside)} | dict(variables)
    if BUILT:
        process: Any = start(*arguments, port=int(variables["PORT"]), image=image, variables=given)
    else:
        given |= {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "teneral", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=given)
    try:
        yield process, process_1(process) if BUILT else process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(
    port: int, method: str, path: str, headers: Mapping[str, str] | None = None, body: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_for(process: Any, port: int, path: str) -> None:
    """Ask as a probe does, until the answer is 200."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read().decode()[-2000:]
        try:
            if ask(port, "GET", path)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{path} never was 200")


@pytest.mark.parametrize("platform", CONTAINERS)
@pytest.mark.timeout(300)
def test_a_pages_container_starts_answers_the_pages_requests_and_ends(platform, walk):
    documents = walk(platform)
    requests = list(requests_of(of_page(platform)))
    assert requests
    answered = 0
    for container in CONTAINERS[platform](documents):
        port = free_port()
        variables = {**container.variables, "PORT": str(port), "SAGEMAKER_BIND_TO_PORT": str(port)}
        variables |= {"TENERAL_PORT": str(port), "TENERAL_HOST": "127.0.0.1"}
        with started(container.arguments, variables) as (process, pid):
            wait_for(process, port, container.alive)
            wait_for(process, port, container.ready)
            for method, path, headers, body in requests:
                if body is not None and json.loads(body).get("model", "chat") != variables["TENERAL_NAME"]:
                    continue
                if container.secrets:
                    assert ask(port, method, path, {"content-type": "application/json"}, body)[0] == 401
                status, data = ask(port, method, path, headers, body)
                assert status == 200, data
                assert not (body and json.loads(body).get("stream")) or data.endswith(b"data: [DONE]\n\n")
                answered += 1
            os.kill(pid, signal.SIGTERM)
            assert process.wait(container.grace_s) == 0
    assert answered >= len(requests)


@pytest.mark.timeout(300)
def test_the_page_of_lambda_answers_its_invocation_and_its_url(walk):
    (template,) = walk("lambda")
    function = template["Resources"]["Function"]["Properties"]
    variables = {**function["Environment"]["Variables"], "AWS_LAMBDA_FUNCTION_NAME": "chat", "PORT": "0"}
    page = of_page("lambda")
    (payload,) = [words[words.index("--payload") + 1] for words in commands(page) if "--payload" in words]
    ((method, path, headers, body),) = requests_of(page)
    event = {
        "version": "2.0",
        "rawPath": path,
        "headers": headers,
        "requestContext": {"http": {"method": method, "path": path}},
        "body": body,
        "isBase64Encoded": False,
    }
    with FakeRuntimeApi() as api:
        variables["AWS_LAMBDA_RUNTIME_API"] = api.address
        with started(function["ImageConfig"]["Command"], variables, "lambda") as (process, pid):
            invoked = api.invoke(json.loads(payload))
            assert invoked.kind == "response", invoked.body
            assert invoked.json["text"], invoked.body
            streamed = api.invoke(event)
            assert streamed.is_streamed
            assert b'"statusCode":200' in streamed.body.replace(b" ", b"")
            assert streamed.body.endswith(b"data: [DONE]\n\n")
            os.kill(pid, signal.SIGTERM)
            assert process.wait(patience_s(LAMBDA_GRACE_S)) == 0


def test_every_platform_is_followed_here_or_by_ray():
    assert set(CONTAINERS) | {"lambda", "ray", "kuberay"} == set(RENDERERS)
