"""Manifests with one flipped bit: each is refused, also where it is still a sound manifest of something else."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import llama_contents, model_store
from tests.support.flipped_bits import accepted_flips, without_own_digest
from tests.support.memory_store import MemoryStore
from tests.support.tiny_models import save_tiny

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import FormatError, IntegrityError
from teneral.loader.format.manifest_json import dump_manifest, manifest_digest, parse_manifest
from teneral.loader.sources.base import ObjectInfo
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.inspect import describe, render_table
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
from teneral.runtime.into.files import load_file

NAME = "manifest.json"
KNOWN, UNKNOWN = b'"generation_config.json"', b'"generation_confif.json"'


@pytest.fixture
def store() -> MemoryStore:
    source = model_store(llama_contents(hidden=64))
    source.put("generation_config.json", b'{"eos_token_id": 2}')
    store = MemoryStore(label="models/small")
    pack(source, store, threads=1)
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    """A model that can be served, packed, with the name of one of its files changed."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", directory / "model")
    (directory / "model" / "generation_config.json").write_text('{"eos_token_id": 2}')
    store = FileStore(directory / "artifact")
    pack(FileStore(directory / "model"), store, threads=1)
    store.put(NAME, store.read(NAME, max_bytes=1 << 20)[0].replace(KNOWN, UNKNOWN, 1))
    return store


def manifest_of(store: MemoryStore) -> bytes:
    return store.read(NAME, max_bytes=1 << 20)[0]


def is_refused(data: bytes) -> bool:
    try:
        parse_manifest(data)
    except FormatError:
        return True
    return False


def test_every_flipped_bit_is_refused(store: MemoryStore) -> None:
    assert accepted_flips(manifest_of(store), parse_manifest) == []


def test_flipped_bits_are_refused_in_a_fine_tune_too(store: MemoryStore) -> None:
    tuned = MemoryStore()
    pack(model_store(llama_contents(hidden=64)), tuned, base=Base(store), threads=1)
    data = bytearray(manifest_of(tuned))
    assert b'"base":"' in data
    rng = random.Random(35)
    for place, bit in {(rng.randrange(len(data)), rng.randrange(8)) for _ in range(3000)}:
        data[place] ^= 1 << bit
        assert is_refused(bytes(data)), (place, bit)
        data[place] ^= 1 << bit


def test_a_file_whose_name_has_changed_is_refused_by_every_reader(folder: FileStore, tmp_path: Path) -> None:
    """The name still parses, and without the file greedy answers would go on after their end."""

    def serve() -> None:
        with Instance(ServeConfig(model=folder.url, cache_dir=str(tmp_path / "cache"))) as instance:
            instance.wait_exact()
            raise instance.failure or AssertionError("it is served")

    readers: dict[str, Callable[[], object]] = {
        "open": lambda: open_artifact(folder),
        "verify": lambda: verify(folder),
        "unpack": lambda: unpack(folder, tmp_path / "back"),
        "as a base": lambda: Base(folder),
        "load_file": lambda: load_file(folder.url),
        "serve": serve,
    }
    for read in readers.values():
        with pytest.raises(IntegrityError, match=r"manifest\.json is damaged: its bytes are not those"):
            read()


def test_an_older_manifest_reads_and_its_readers_say_what_it_lacks(store: MemoryStore) -> None:
    data = manifest_of(store)
    pin = manifest_digest(data)
    store.put(NAME, without_own_digest(data))
    assert open_artifact(store, digest=pin).has_own_digest is False
    report = verify(store)
    assert report.ok
    assert "The manifest has no digest of its own" in report.render()
    assert "no digest of its own" not in verify(store, digest=pin).render(), "a pin is as good"
    description = describe(open_artifact(store), store.url)
    assert description["has_own_digest"] is False
    assert "The manifest has no digest of its own" in render_table(description)
    store.put(NAME, data)
    assert "no digest of its own" not in verify(store).render() + render_table(
        describe(open_artifact(store), store.url)
    )


def test_a_bit_that_flipped_on_the_way_costs_one_more_read(store: MemoryStore) -> None:
    data = manifest_of(store)
    way = FlippingStore(store)
    assert open_artifact(way).digest == manifest_digest(data)
    assert way.flips == 1


class FlippingStore:
    """A store whose first answer with the manifest has one bit flipped."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.flips = 0

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = self._store.read(name, max_bytes=max_bytes)
        if name == NAME and not self.flips:
            self.flips = 1
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return data, info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_names_that_nothing_uses_are_shown(folder: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    store, unknown = folder, "generation_confif.json"
    manifest = parse_manifest(without_own_digest(store.read(NAME, max_bytes=1 << 20)[0]))
    store.put(NAME, dump_manifest(manifest))
    assert f"as their names are not known: {unknown}" in verify(store).render()
    description = describe(open_artifact(store), store.url)
    assert f"as their names are not known: {unknown}" in render_table(description)
    with caplog.at_level(logging.WARNING), Instance(ServeConfig(model=store.url)) as instance:
        assert instance.wait_exact()
    assert f"small files that nothing uses, as their names are not known: {unknown}" in caplog.text


def test_packing_says_which_files_it_leaves_out() -> None:
    source = model_store(llama_contents(hidden=64))
    source.put("generation_confif.json", b"{}")
    source.put("README.md", b"no settings")
    result = pack(source, MemoryStore())
    assert result.left_out == ("generation_confif.json",)
    assert "not packed, as these names are not known: generation_confif.json" in result.render()
