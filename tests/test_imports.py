"""The modules that an import may bring along. A cold start pays for every module, so the lists are
short and kept.
"""

from __future__ import annotations

import ast
import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent
FOLDERS = ("loader", "runtime", "handlers", "infra")

HEAVY = {
    "torch", "transformers", "numpy", "aiohttp", "asyncio", "boto3", "botocore", "tokenizers", "jinja2", "msgspec",
    "prometheus_client", "cupy", "zstandard", "blake3", "ssl", "http.client", "urllib.request", "email",
    "concurrent.futures", "llguidance",
}  # fmt: skip


# Those that servers of all kinds import, with what these import in turn.
SERVER_MODULES = (
    "handlers.anthropic.messages", "handlers.app", "handlers.openai.chat", "handlers.openai.responses",
    "handlers.openai.tools.choose", "handlers.plain", "handlers.platforms.aws_lambda.loop",
    "handlers.platforms.kserve.api", "handlers.platforms.sagemaker", "handlers.serve", "handlers.standby.pool",
    "loader.cache.part_cache", "loader.load.child", "loader.load.load", "loader.load.targets.mapped",
    "loader.load.experts", "runtime.adapters.registry", "runtime.backends.choose",
    "runtime.backends.native.backend", "runtime.instance.model", "runtime.engine.embedder", "runtime.engine.engine",
    "runtime.grammar.json_schema", "runtime.instance.instance", "runtime.kv.snapshots.service", "runtime.metrics",
    "runtime.models.build", "runtime.onnx.runner", "runtime.onnx.start", "runtime.text.remote",
    "runtime.text.tokenizer_child",
)  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """Modules that are there after the statement and were not before it, in a fresh interpreter."""
    program = (
        "import sys, json; before = set(sys.modules); "
        + statement
        + "; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=patience_s(60)
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import teneral", set()),
        ("import teneral.cli", set()),
        ("import teneral.cli; teneral.cli.parse(['serve', 'model'])", set()),
        ("import teneral.handlers.serve", set()),
        ("import teneral.handlers.platforms.aws_lambda.command, teneral.handlers.lifecycle", set()),
        ("import teneral.loader, teneral.runtime, teneral.handlers", set()),
        (
            "import teneral.runtime.models, teneral.runtime.kv, teneral.loader.sources, teneral.handlers.http",
            set(),
        ),
    ],
)
def test_an_import_brings_only_what_it_may(statement: str, allowed: set[str]) -> None:
    loaded = loaded_by(statement)
    assert loaded & HEAVY <= allowed


def test_the_instance_starts_to_fetch_without_torch_or_a_web_server() -> None:
    loaded = loaded_by("import teneral.runtime.instance.instance")
    assert not loaded & {
        "torch",
        "transformers",
        "aiohttp",
        "asyncio",
        "boto3",
        "tokenizers",
        "jinja2",
        "prometheus_client",
    }


def test_an_engine_needs_no_web_server_and_an_application_imports_it_with_its_first_request() -> None:
    loaded = loaded_by("import teneral; teneral.Engine; teneral.asgi_app")
    assert not loaded & {"torch", "aiohttp", "boto3", "tokenizers", "jinja2", "prometheus_client", "numpy"}


def test_a_function_on_lambda_that_no_http_request_reaches_needs_no_web_server() -> None:
    loaded = loaded_by(
        "import teneral.handlers.platforms.aws_lambda.loop, teneral.handlers.platforms.aws_lambda.answers; "
        "import teneral.handlers.plain"
    )
    assert not loaded & {"aiohttp", "boto3", "torch", "http.client"}


def test_a_pools_front_needs_no_torch() -> None:
    loaded = loaded_by("import teneral.handlers.pool.run, teneral.handlers.pool.measure")
    assert not loaded & {"torch", "transformers", "tokenizers", "jinja2", "boto3"}


def test_serving_never_needs_transformers() -> None:
    loaded = loaded_by(
        "import teneral.handlers.app, teneral.runtime.engine.engine, teneral.runtime.models.build"
    )
    assert "transformers" not in loaded


def test_onnxruntime_is_imported_for_onnx_models_alone() -> None:
    server = "import teneral.handlers.app, teneral.runtime.instance, teneral.handlers.platforms.kserve.api"
    assert not loaded_by(f"{server}, teneral.runtime.onnx.pack") & {"onnx", "onnxruntime"}
    assert "torch" not in loaded_by("import teneral.runtime.onnx.start, teneral.runtime.onnx.sessions")


def test_a_server_imports_what_a_platform_needs_when_that_platform_asks() -> None:
    loaded = loaded_by("import teneral.handlers.serve, teneral.handlers.app")
    platforms = ("sagemaker", "cloudevents", "runpod", "aws_lambda.command", "kserve.api")
    assert not loaded & {f"teneral.handlers.platforms.{name}" for name in platforms}
    assert "teneral.handlers.plain" not in loaded


# With code in them, of the server's process: about what a reader of one cold chat has to follow. Those of requests and
# models that ask for more are imported by these: tools, grammars, images, adapters, spilled blocks, encoders.
MAX_FILES_OF_A_CHAT = 156
SERVER = """
import json, signal, sys
from teneral.cli import run

def tell(*_):
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith("teneral.")]
    print(json.dumps(files), flush=True)

signal.signal(signal.SIGUSR1, tell)
run(sys.argv[1:])
"""


def test_the_first_chat_of_a_cold_server_imports_few_files(tmp_path: Path) -> None:
    plain, packed, port = tmp_path / "plain", tmp_path / "packed", free_port()
    shutil.copytree(ROOT / "demo" / "model", plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (plain / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    subprocess.run([sys.executable, "-m", "teneral", "pack", "--quiet", plain, packed], check=True)
    command = [sys.executable, "-c", SERVER, "serve", str(packed), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert chat(port)["usage"]["completion_tokens"] == 2
            server.send_signal(signal.SIGUSR1)
            files = [Path(name) for name in json.loads(server.stdout.readline()) if name]
        finally:
            server.kill()
    with_code = [file for file in files if len(ast.parse(file.read_text(encoding="utf-8")).body) > 1]
    assert len(with_code) <= MAX_FILES_OF_A_CHAT, sorted(map(str, with_code))


def chat(port: int) -> dict[str, Any]:
    """The answer of two tokens to a chat, once the server listens."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "ignore_eos": True}
    )
    until_s = time.monotonic() + patience_s(30)
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s(30))
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.load(connection.getresponse())
            return answer
        except ConnectionRefusedError:
            assert time.monotonic() < until_s, "the port did not open"
            time.sleep(0.01)
        finally:
            connection.close()


def test_an_engine_needs_no_statistics() -> None:
    """They bring fractions and decimal numbers along."""
    assert not loaded_by("import teneral.runtime.engine.engine") & {"statistics", "fractions"}


def test_a_server_makes_no_dataclass() -> None:
    """Each takes 0.3 ms of a start; a struct takes 12 µs (decision 0050)."""
    program = f"""
import sys
import {", ".join(f"teneral.{name}" for name in SERVER_MODULES)}
print([
    name for name, module in list(sys.modules.items()) if name.startswith("teneral.")
    and any("__dataclass_fields__" in vars(value) for value in vars(module).values() if isinstance(value, type))
])"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=patience_s(60)
    )
    assert done.stdout.strip() == "[]"


def test_the_public_names_exist_and_have_types() -> None:
    pytest.importorskip("torch", reason="some of the names need torch")
    import teneral

    assert [name for name in teneral.__all__ if not hasattr(teneral, name)] == []
    stub = ast.parse((ROOT / "src" / "teneral" / "__init__.pyi").read_text(encoding="utf-8"))
    typed = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {"__version__", *typed} == set(teneral.__all__)
    assert all(getattr(teneral, name).__name__ == name for name in typed)


def test_the_folders_are_never_imported_under_their_bare_names() -> None:
    """`import loader` would make a second copy of every class; within the package, imports are relative."""
    bare = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            bare += [f"{path}:{name}" for name in names if name.partition(".")[0] in FOLDERS]
    assert bare == []
