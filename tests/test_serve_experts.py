"""`teneral serve` of a mixture of experts, as a user types it: whole, and with `--weights-bytes`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server

from teneral.loader.artifact import open_artifact
from teneral.loader.native.library import library
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = pytest.mark.skipif(library() is None, reason="the native libraries are not built here")

WAIT_S = patience_s(60)
PROMPTS = ("hello there", "a longer prompt, which many experts look at", "1 2 3")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    shape = {"num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 128, "intermediate_size": 256}
    save_tiny("olmoe", folder / "model", dtype=torch.bfloat16, **shape)
    pack(FileStore(folder / "model"), FileStore(folder / "packed"))
    return folder / "packed"


def answers(server: Server) -> list[Any]:
    """Of all prompts, asked at the same time."""
    found: dict[str, Any] = {}

    def ask(prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
        found[prompt] = server.ask("POST", "/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(found[prompt][0] == 200 for prompt in PROMPTS), found
    return [json.loads(found[prompt][1])["choices"] for prompt in PROMPTS]


def metric(server: Server, name: str) -> float:
    text = server.ask("GET", "/metrics")[1].decode()
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_half_of_the_memory_gives_the_same_answers(artifact: Path) -> None:
    server = Server(artifact, "--name", "tiny")
    try:
        expected = answers(server)
        assert "teneral_experts" not in server.ask("GET", "/metrics")[1].decode()
    finally:
        server.close()
    half = open_artifact(FileStore(artifact)).weight_bytes // 2
    server = Server(artifact, "--name", "tiny", "--weights-bytes", str(half))
    try:
        assert answers(server) == expected
        assert answers(server) == expected
        assert json.loads(server.ask("GET", "/readyz")[1])["state"] == "ready"
        assert metric(server, "teneral_experts_evictions_total") > 0
        assert metric(server, "teneral_experts_resident_bytes") <= half
        assert server.end() == 0
    finally:
        server.close()


def test_too_little_memory_is_refused_with_the_numbers(artifact: Path) -> None:
    command = [sys.executable, "-m", "teneral", "serve", str(artifact), "--host", "127.0.0.1", "--port", "0"]
    done = subprocess.run(
        [*command, "--weights-bytes", "64KiB"], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode != 0
    assert "a step needs" in done.stderr
    assert "MiB" in done.stderr
