"""Sources that rest: a process that stands still, or is copied, keeps nothing that may go stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.gguf_files import float_tensors, gguf_file, metadata
from tests.support.store_server import StoreServer

from teneral.loader.artifact import open_model
from teneral.loader.sources.base import Remote, SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.open import open_source
from teneral.loader.sources.s3.credentials import CredentialChain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"some bytes")
    return tmp_path


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_idle_connections_are_closed_and_made_anew(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with StoreServer(folder) as store:
        options = SourceOptions(endpoint_url=store.url, region="us-east-1")
        source = open_source(*(("s3://bucket", options) if kind == "s3" else (f"{store.url}/bucket", None)))
        assert isinstance(source, Remote)
        for _ in range(2):
            source.read("a", max_bytes=100)
        assert store.num_connections == 1
        source.quiesce()
        assert source.read("a", max_bytes=100)[0] == b"some bytes"
        assert store.num_connections == 2
        source.close()


def test_what_is_on_this_machine_has_nothing_of_the_kind(folder: Path) -> None:
    assert not isinstance(FileStore(folder), Remote)


def test_a_gguf_file_has_what_its_store_has(folder: Path) -> None:
    (folder / "bucket" / "m.gguf").write_bytes(gguf_file(metadata(), float_tensors()))
    assert not isinstance(open_model(str(folder / "bucket" / "m.gguf")), Remote)
    with StoreServer(folder) as store:
        source = open_model(f"{store.url}/bucket/m.gguf")
        assert isinstance(source, Remote)
        source.stat("config.json")
        source.quiesce()
        source.read_into("model.safetensors", 0, memoryview(bytearray(8)))
        source.read_into(
            "model.safetensors", source.stat("model.safetensors").size_bytes - 8, memoryview(bytearray(8))
        )
        assert store.num_connections == 2
        source.close()


def test_credentials_are_looked_for_again() -> None:
    environment = {"AWS_ACCESS_KEY_ID": "before", "AWS_SECRET_ACCESS_KEY": "x"}
    chain = CredentialChain(environment, profile=None)
    assert chain.get().access_key_id == "before"
    environment["AWS_ACCESS_KEY_ID"] = "after"
    assert chain.get().access_key_id == "before"
    chain.forget()
    assert chain.get().access_key_id == "after"
