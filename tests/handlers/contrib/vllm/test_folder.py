"""The folder that vLLM reads a model's configuration and tokenizer from."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.handlers.contrib.vllm.folder import is_model_folder, write_small_files
from teneral.loader.errors import CheckpointError, IntegrityError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def pin(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return pack(FileStore(plain), FileStore(tmp_path_factory.mktemp("packed"))).pin


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_it_has_the_small_files_and_no_weights(pin, plain, tmp_path):
    written = write_small_files(pin, tmp_path)
    assert names(written.folder) == {path.name for path in plain.iterdir()} - {"model.safetensors"}
    assert json.loads((written.folder / "config.json").read_text()) == json.loads(
        (plain / "config.json").read_text()
    )


def test_the_weights_address_is_pinned_and_absolute(pin, tmp_path, monkeypatch):
    packed = Path(pin.partition("@b3:")[0])
    monkeypatch.chdir(packed.parent)
    written = write_small_files(packed.name, tmp_path)
    assert written.address == pin
    assert written == write_small_files(pin, tmp_path)  # and the folder is the same for every caller


def test_existing_files_are_corrected(pin, tmp_path):
    written = write_small_files(pin, tmp_path)
    (written.folder / "config.json").write_text("{")
    write_small_files(pin, tmp_path)
    assert json.loads((written.folder / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_an_address_will_do(pin, plain, tmp_path, kind):
    folder = plain if kind == "plain" else Path(pin.partition("@b3:")[0])
    with StoreServer(folder.parent) as server:
        address = f"{server.url}/{folder.name}"
        written = write_small_files(address, tmp_path)
    assert written.address == (address if kind == "plain" else f"{address}{pin[pin.index('@b3:') :]}")
    assert {"config.json", "tokenizer.json"} <= names(written.folder)


def test_another_artifact_than_the_pinned_one_is_refused_and_nothing_written(pin, tmp_path):
    with pytest.raises(IntegrityError):
        write_small_files(pin[:-64] + "0" * 64, tmp_path)
    assert names(tmp_path) == set()


def test_a_model_without_a_configuration_is_refused(plain, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        write_small_files(str(tmp_path / "model"), tmp_path / "cache")
    assert caught.value.hint


def test_only_a_local_folder_as_vllm_knows_them_is_left_as_it_is(pin, plain, tmp_path):
    assert is_model_folder(str(plain))
    assert not is_model_folder(pin.partition("@b3:")[0])
    assert not is_model_folder("s3://bucket/model")
    pack(FileStore(plain), FileStore(tmp_path))
    (tmp_path / "config.json").write_text("{}")  # an artifact in a checkpoint's folder
    assert not is_model_folder(str(tmp_path))


def test_vllm_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["vllm.general_plugins"]
    assert list(entries) == ["teneral"]
    module, _, function = entries["teneral"].partition(":")
    assert callable(getattr(import_module(module), function))
