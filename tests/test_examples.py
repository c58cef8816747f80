"""The programs of `examples/` and of docs/engine.md, run as a reader would, with a tiny model.

`any_module.py` makes a model of its own.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.doc_fragments import ROOT, Block, of_language
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server

EXAMPLES = ROOT / "examples"
BLOCKS = [block for block in of_language("python") if block.page.name == "engine.md"]
HUB_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
WAIT_S = patience_s(60)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}: scripts/conformance-asgi")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("examples") / "model"
    save_tiny("qwen2", model)
    return model


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_program_of_the_page_about_engines(model: Path, block: Block) -> None:
    if "fastapi" in block.text and find_spec("fastapi") is None:
        pytest.skip("FastAPI is not installed: scripts/conformance-asgi")
    assert HUB_NAME in block.text
    run("-c", block.text.replace(HUB_NAME, str(model)))


def test_each_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert {name for name in names if Path(name).stem not in source} == set()


def test_the_plain_program(model: Path) -> None:
    printed = run(EXAMPLES / "engine.py", model)
    assert "5 tokens" in printed
    assert "refused: " in printed


@pytest.mark.slow
def test_weights_in_a_module_of_the_users_own() -> None:
    assert "first output" in run(EXAMPLES / "any_module.py")


async def test_the_cells_of_the_notebook(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a running event loop, with `await` at the top of a cell, as a notebook runs them."""
    monkeypatch.setenv("MODEL", str(model))
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.isawaitable(result):
                await asyncio.wait_for(result, WAIT_S)
    assert capsys.readouterr().out


@needs("fastapi", "uvicorn")
def test_the_fastapi_program(model: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", EXAMPLES, "--port", str(port), "fastapi_app:app"]
    server = subprocess.Popen(command, env={**os.environ, "MODEL": str(model)}, stderr=subprocess.PIPE)
    try:
        until_s = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until_s
                assert server.poll() is None
                time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/summary?text=wings", timeout=WAIT_S) as answer:
            assert answer.read()
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{url}/llm/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=WAIT_S)
    assert b"Application shutdown complete" in errors
    assert b"Traceback" not in errors


@needs("langchain_openai")
def test_langchains_chat_model(model: Path) -> None:
    server = Server(str(model), "--name", "tiny")
    try:
        assert "tokens\n" in run(EXAMPLES / "langchain_chat.py", f"http://127.0.0.1:{server.port}/v1", "tiny")
    finally:
        server.close()
