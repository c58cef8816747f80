"""Rendered documents by tools that Teneral cannot install with it: `scripts/conformance-infra` brings them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests.support.doc_fragments import DOCS, blocks
from tests.support.load import patience_s
from tests.support.pool_files import PLAIN, VERSIONED, render_text
from tests.support.ports import free_port
from tests.support.store_certificate import write_certificate

from teneral.infra.render.render import RENDERERS

ROOT = Path(__file__).parents[2]
RENDERED = ROOT / "infra" / "rendered"


def tool(name: str) -> str:
    path = os.environ.get(f"TENERAL_TEST_{name}", "")
    if not path:
        pytest.skip(f"needs {name.lower()}: scripts/conformance-infra")
    return path


def test_every_platforms_documents_are_committed():
    assert {path.name for path in RENDERED.iterdir()} == set(RENDERERS)


@pytest.mark.parametrize("file", sorted(RENDERED.glob("lambda/*.yaml")), ids=lambda path: path.name)
def test_sam_takes_a_lambda_template(file, tmp_path):
    environment = {
        **os.environ, "AWS_DEFAULT_REGION": "eu-central-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "SAM_CLI_TELEMETRY": "0", "HOME": str(tmp_path),
    }  # fmt: skip
    result = subprocess.run(
        [tool("SAM"), "validate", "--lint", "--template", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("platform", ["kubernetes", "knative", "kserve"])
def test_kustomize_takes_a_rendered_folder_as_resources(platform, tmp_path):
    for file in RENDERED.glob(f"{platform}/*.yaml"):
        shutil.copy(file, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": names, "namespace": "models"}))
    result = subprocess.run(
        [tool("KUBECTL"), "kustomize", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert len([each for each in yaml.safe_load_all(result.stdout) if each]) == len(names)


@pytest.mark.parametrize("text", [PLAIN, VERSIONED, PLAIN + '[models.m.serve]\napi_key_env = "KEY"\n'])
def test_googles_types_have_every_field_of_a_cloud_run_service(text):
    documents = [dict(document.body) for document in render_text(text, "cloud-run").documents]
    program = ROOT / "tests" / "support" / "cloud_run_types.py"
    result = subprocess.run(
        [tool("CLOUD_RUN"), program], input=json.dumps(documents), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.timeout(600)
def test_checkov_finds_nothing_that_its_file_does_not_argue():
    result = subprocess.run(
        [tool("CHECKOV"), "--config-file", ROOT / "infra" / "checkov.yaml", "--skip-download"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.timeout(300)
def test_caddy_ends_tls_as_the_page_says(tmp_path):
    """docs/security.md, TLS by a sidecar: its file before a server that hosts' names do not open by themselves."""
    caddy, name = tool("CADDY"), "models.store.example"
    server_port, port = free_port(), free_port()
    certificate = write_certificate(tmp_path / "tls.pem")
    (page,) = (block.text for block in blocks(DOCS / "security.md") if block.language == "caddy")
    for old, new in {
        "models.example.com": f"{name}:{port}",
        "/run/secrets/tls.crt": str(certificate),
        "/run/secrets/tls.key": str(certificate),
        "127.0.0.1:8080": f"127.0.0.1:{server_port}",
    }.items():
        assert old in page
        page = page.replace(old, new)
    (tmp_path / "Caddyfile").write_text(page)
    serve = [
        sys.executable,
        "-m",
        "teneral",
        "serve",
        str(ROOT / "demo" / "model"),
        "--port",
        str(server_port),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TENERAL_")}
    context = ssl.create_default_context(cafile=str(certificate))

    def ask(port: int, name: str, context: ssl.SSLContext | None) -> tuple[int, bytes]:
        """Status and body, once the port is open."""
        until_s = time.monotonic() + patience_s(60)
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=patience_s(60))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until_s
                assert server.poll() is None
                time.sleep(0.05)
        client = http.client.HTTPConnection(name)
        client.sock = sock if context is None else context.wrap_socket(sock, server_hostname=name)
        body = {"prompt": "def add", "max_tokens": 4, "stream": True}
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = client.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            client.close()

    with (
        subprocess.Popen([*serve, "--allowed-hosts", name], env=clean) as server,
        subprocess.Popen(
            [caddy, "run", "--config", tmp_path / "Caddyfile"], env={**clean, "HOME": str(tmp_path)}
        ) as proxy,
    ):
        try:
            status, body = ask(server_port, "another.example", None)
            assert status == 403, body
            status, body = ask(port, name, context)
            assert status == 200, body
            assert body.endswith(b"data: [DONE]\n\n")
        finally:
            proxy.kill()  # its own end waits for connections
            server.terminate()
