"""A kind of store is one file and one row: `tests/support/toy_store.py` is both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny
from tests.support.toy_store import ROW
from tests.test_serve import Server

from teneral.handlers.pool.file import parse_pool
from teneral.loader.errors import UsageError
from teneral.loader.sources.open import KINDS, is_read_only, open_store

TENERAL = [sys.executable, "-m", "tests.support.toy_store"]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "toy", ROW["toy"])


def run(*arguments: str) -> str:
    return subprocess.run(
        [*TENERAL, *arguments], capture_output=True, text=True, check=True, timeout=patience_s(120)
    ).stdout


def test_its_address_opens_it_and_messages_name_its_form(row: None, tmp_path: Path) -> None:
    store = open_store(f"toy://{tmp_path}/objects.db/model")
    store.put("config.json", b"{}")
    assert [info.name for info in store.list()] == ["config.json"]
    assert not is_read_only("toy:///objects.db")
    with pytest.raises(UsageError) as caught:
        open_store("tay://objects.db")
    assert "toy:///folder/objects.db/prefix" in str(caught.value.hint)


def test_a_pool_file_may_name_it(row: None) -> None:
    text = 'version = 1\n[models.chat]\nsource = "toy:///objects.db/chat"\n'
    assert parse_pool(text).models["chat"].source == "toy:///objects.db/chat"


def test_a_model_is_packed_into_it_verified_and_served_from_it(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    address = f"toy://{tmp_path}/objects.db/models/tiny"
    run("pack", str(tmp_path / "model"), address, "--quiet")
    run("verify", address, "--quiet")
    assert "parts" in run("inspect", address)
    run("unpack", address, str(tmp_path / "back"), "--quiet")
    given, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "back"))
    assert given.keys() == back.keys()
    assert all(torch.equal(given[name], back[name]) for name in given)
    body = {"model": "tiny", "prompt": "The", "max_tokens": 4, "temperature": 0}
    answers = []
    for model in (address, tmp_path / "model"):
        server = Server(model, "--name", "tiny", program=TENERAL)
        status, answer = server.ask("POST", "/v1/completions", body)
        assert (status, server.end()) == (200, 0)
        server.close()
        answers.append(answer.partition(b'"choices"')[2])
    assert answers[0] == answers[1]
