"""The progress of a long load at a terminal, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny
from tests.test_serve import TENERAL, Server

LOAD_S = 8.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a model that takes this long to load."""
    model = save_tiny("llama", tmp_path / "models" / "tiny")
    size_bytes = (model / "model.safetensors").stat().st_size
    with StoreServer(tmp_path, rate_mb_s=size_bytes / LOAD_S / 1e6) as server:
        yield f"{server.url}/models/tiny"


def test_a_terminal_shows_rate_and_remaining_time(address: str) -> None:
    ours, theirs = os.openpty()
    command = [*TENERAL, "serve", address, "--port", "0"]
    process = subprocess.Popen(command, stderr=theirs)
    os.close(theirs)
    shown = ""
    try:
        while not re.search(r"loading  .*%  .* of .*/s  \d+ s left", shown):
            shown += os.read(ours, 4096).decode(errors="replace")
    except OSError:
        pytest.fail(f"it ended: {shown}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_log_has_no_such_line(address: str) -> None:
    server = Server(address)
    try:
        assert (
            server.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})[0] == 200
        )
    finally:
        server.process.kill()
        assert server.process.stderr is not None
        assert "loading" not in server.process.stderr.read()
        server.close()
