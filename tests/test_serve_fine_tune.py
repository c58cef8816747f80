"""`teneral serve` of a fine-tune that is stored as differences: it answers what the whole fine-tune answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
REQUEST = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0, "logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a model with other weights, and that one packed whole and as differences."""
    path = tmp_path_factory.mktemp("fine-tune")
    save_tiny("llama", path / "model")
    save_tiny("llama", path / "tuned")
    shift_weights(path / "tuned" / "model.safetensors")
    pack(FileStore(path / "model"), FileStore(path / "base"))
    pack(FileStore(path / "tuned"), FileStore(path / "whole"))
    pack(FileStore(path / "tuned"), FileStore(path / "delta"), base=Base(FileStore(path / "base")))
    return path


def shift_weights(file: Path) -> None:
    """Every eighth weight of the matrices by an eighth of itself or so."""
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__" and len(entry["shape"]) == 2:
            width = {"BF16": 2, "F32": 4}[entry["dtype"]]
            first, last = entry["data_offsets"]
            words = np.frombuffer(data, f"<u{width}", (last - first) // width, begin + first)
            words[::8] += 1 << (4 if width == 2 else 20)
    file.write_bytes(data)


def answer_of(model: Path, *flags: str) -> Any:
    server = Server(model, "--name", "tiny", *flags)
    try:
        status, data = server.ask("POST", "/v1/completions", REQUEST)
        assert status == 200, data
        return json.loads(data)["choices"]
    finally:
        server.close()


def test_the_answers_are_those_of_the_whole_fine_tune(folder: Path) -> None:
    whole = answer_of(folder / "whole")
    assert answer_of(folder / "delta", "--base", str(folder / "base")) == whole
    assert answer_of(folder / "base") != whole


def test_a_server_without_the_base_says_what_it_needs(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "teneral",
        "serve",
        str(folder / "delta"),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode != 0
    assert "only the differences to b3:" in done.stderr
    assert "--base" in done.stderr


def test_the_command_line_packs_unpacks_and_inspects_with_a_base(folder: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "teneral", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout

    assert "differ" in run("pack", folder / "tuned", tmp_path / "delta", "--base", folder / "base", "--quiet")
    assert "differences to it" in run("inspect", tmp_path / "delta")
    assert "intact" in run("verify", tmp_path / "delta", "--base", folder / "base", "--quiet")
    run("unpack", tmp_path / "delta", tmp_path / "one", "--base", folder / "base", "--quiet")
    run("unpack", folder / "whole", tmp_path / "other", "--quiet")
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
