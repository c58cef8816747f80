"""Models in the Hub's local cache, which Hugging Face's own library has written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.hub_library import run
from tests.support.hub_server import HubServer, Repository, use_hub

from teneral.loader.artifact import open_model
from teneral.loader.errors import NotFoundError
from teneral.loader.sources.base import Mappable, SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.open import open_source

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    SHARDS[0]: b"one",
    SHARDS[1]: b"two",
    "tiny-Q8_0.gguf": b"GGUF",
    "sub/config.json": b"{}",
}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, Path]]:
    """A Hub, and what the library has downloaded of its model and of a branch."""
    with HubServer() as server:
        repository = server.repository("org/tiny", FILES)
        repository.commit(FILES | {"config.json": b"{ }"}, branch="refs/pr/1")
        home = tmp_path_factory.mktemp("home")
        for revision in ("main", "refs/pr/1"):
            run(f"hub.snapshot_download('org/tiny', revision='{revision}')", server, home)
        yield server, home


@pytest.fixture
def hub(downloaded: tuple[HubServer, Path], tmp_path: Path) -> Iterator[HubServer]:
    """With the download copied, so that tests may change it."""
    server, home = downloaded
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, tmp_path / "home")
        server.calls.clear()
        yield server


def snapshot(home: Path, repository: Repository, revision: str = "main") -> Path:
    return home / "hub" / "models--org--tiny" / "snapshots" / repository.refs[revision]


def is_local(url: str) -> bool:
    source = open_source(url)
    source.close()
    return isinstance(source, FileStore)


def test_a_downloaded_model_is_a_folder_and_needs_no_network(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repositories["org/tiny"]
    for revision in ("main", "refs/pr/1", *repository.refs.values()):
        assert is_local(f"hf://org/tiny@{revision}")
    source = open_source("hf://org/tiny")
    assert isinstance(source, Mappable)
    assert source.url == str(snapshot(tmp_path / "home", repository))
    assert source.map(SHARDS[0]) == b"one"
    assert open_source("hf://org/tiny@refs/pr/1").read("config.json", max_bytes=9)[0] == b"{ }"
    assert not hub.calls


def test_a_branch_is_as_it_was_downloaded(hub: HubServer) -> None:
    repository = hub.repositories["org/tiny"]
    before = dict(repository.refs)
    newer = repository.commit(FILES | {"config.json": b"[]"})
    assert is_local("hf://org/tiny")
    assert not is_local(f"hf://org/tiny@{newer}")
    repository.refs = before


@pytest.mark.parametrize(
    "missing", ["config.json", "tokenizer.json", SHARDS[1], "model.safetensors.index.json"]
)
def test_an_unfinished_download_is_not_used_unless_offline(
    hub: HubServer, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snapshot(tmp_path / "home", hub.repositories["org/tiny"]) / missing).unlink()
    assert not is_local("hf://org/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert is_local("hf://org/tiny")


@pytest.mark.parametrize(
    "index", [b"", b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"[" * 100_000]
)
def test_a_damaged_index_is_no_whole_model(hub: HubServer, index: bytes, tmp_path: Path) -> None:
    path = snapshot(tmp_path / "home", hub.repositories["org/tiny"]) / "model.safetensors.index.json"
    path.unlink()
    path.write_bytes(index)
    assert not is_local("hf://org/tiny")


def test_other_models_revisions_and_folders_are_not_in_the_cache(hub: HubServer) -> None:
    for url in ("hf://org/other", "hf://org/tiny@v2", "hf://org/tiny/sub", f"hf://org/tiny@{'0' * 40}"):
        assert not is_local(url)


def test_a_ref_that_leads_elsewhere_is_not_followed(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "home" / "hub" / "models--org--tiny" / "refs" / "main").write_text("../../../../etc")
    assert not is_local("hf://org/tiny")


def test_a_gguf_file_in_the_cache_is_chosen_there(hub: HubServer) -> None:
    assert is_local("hf://org/tiny:q8_0")
    assert not is_local("hf://org/tiny:Q4_K_M")
    source = open_model("org/tiny:Q8_0")
    assert "snapshots" in source.url
    with closing(open_model("org/tiny:Q4_K_M")) as other, pytest.raises(NotFoundError, match="Q4_K_M"):
        other.read("config.json", max_bytes=10)


def test_offline_a_model_that_was_not_downloaded_says_how_to(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set") as caught:
        open_source("hf://org/other@v2")
    assert "hf download org/other --revision v2" in caught.value.hint
    assert not hub.calls


def test_the_caches_own_variable_goes_before_the_home(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert not is_local("hf://org/tiny")
    (tmp_path / "home" / "hub").rename(tmp_path / "elsewhere")
    assert is_local("hf://org/tiny")


def test_what_is_packed_from_the_cache_may_be_links_to_its_blobs(hub: HubServer) -> None:
    source = open_source("hf://org/tiny", SourceOptions(outside_links=False))
    assert source.read(SHARDS[0], max_bytes=10)[0] == b"one"
