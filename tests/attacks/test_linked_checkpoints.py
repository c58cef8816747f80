"""Models whose files are symbolic links: packing follows none that leads to a file of the machine's owner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support import onnx_models
from tests.support.checkpoints import llama_contents, model_objects
from tests.support.gguf_files import float_tensors, gguf_file, metadata

from teneral import cli
from teneral.loader.errors import CheckpointError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.verify import verify

SECRET = b'{"aws_secret_access_key": "hidden"}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "credentials"
    path.write_bytes(SECRET)
    return path


def write_model(folder: Path) -> Path:
    for name, data in model_objects(llama_contents(num_layers=1)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def pack(model: Path, out: Path, *flags: str) -> int:
    return cli.run(["pack", str(model), str(out), "--quiet", *flags])


def packed_bytes(out: Path) -> bytes:
    return b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "config.json", "tokenizer_config.json", "model.safetensors", "LICENSE"]
)
@pytest.mark.parametrize("form", ["absolute", "relative", "through a folder"])
def test_a_link_out_of_the_model_is_refused_by_name(
    model: Path, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, form: str
) -> None:
    (model / name).unlink(missing_ok=True)
    if form == "through a folder":
        (model / "inner").symlink_to(secret.parent)
        (model / name).symlink_to("inner/credentials")
    else:
        (model / name).symlink_to(secret if form == "absolute" else "../home/credentials")
    out = tmp_path / "out"
    assert pack(model, out) != 0
    error = capsys.readouterr().err
    assert f"{name} in {model} is a link to" in error
    assert "outside of the model's folder" in error
    assert not (out / "manifest.json").exists()
    assert b"hidden" not in packed_bytes(out)


def test_a_folder_of_the_model_may_not_be_elsewhere(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes(SECRET)
    shutil.rmtree(model / "1_Pooling")
    (model / "1_Pooling").symlink_to(tmp_path / "other")
    assert pack(model, tmp_path / "out") != 0
    assert "1_Pooling/config.json in" in capsys.readouterr().err


def test_links_inside_the_model_and_to_the_model_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "files").mkdir()
    shutil.move(model / "config.json", model / "files" / "config.json")
    (model / "config.json").symlink_to("files/config.json")
    (tmp_path / "link").symlink_to(model)
    (model / "README.md").symlink_to("/etc/hostname")  # which nothing reads
    assert pack(tmp_path / "link", tmp_path / "out") == 0
    assert verify(FileStore(tmp_path / "out")).ok


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A hub's cache, with all files of its snapshot among the blobs."""
    cache = tmp_path / "hub" / "models--org--name"
    folder = write_model(cache / "snapshots" / "abc123")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = cache / "blobs" / f"{number:064x}"
        shutil.move(path, blob)
        depth = len(path.relative_to(folder).parts) + 1
        path.symlink_to(Path(*[".."] * depth, "blobs", blob.name))
    return folder


def test_a_hubs_cache_is_packed(snapshot: Path, tmp_path: Path) -> None:
    assert pack(snapshot, tmp_path / "out") == 0
    assert verify(FileStore(tmp_path / "out")).ok


@pytest.mark.parametrize("target", ["../../refs/main", "../../../models--other--name/blobs/1"])
def test_nothing_else_of_a_hubs_cache_is_packed(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    path = snapshot / target
    path.parent.mkdir(parents=True)
    path.write_bytes(SECRET)
    (snapshot / "vocab.txt").symlink_to(target)
    assert pack(snapshot, tmp_path / "out") != 0
    assert "vocab.txt in" in capsys.readouterr().err


def test_blobs_that_are_a_link_themselves_are_refused(snapshot: Path, tmp_path: Path, secret: Path) -> None:
    """An archive might bring such a link, with all of the names that lie in a folder of the machine."""
    blobs = snapshot.parents[1] / "blobs"
    shutil.rmtree(blobs)
    blobs.symlink_to(secret.parent)
    (snapshot / "vocab.txt").symlink_to("../../blobs/credentials")
    with pytest.raises(CheckpointError, match="outside of the model's folder"):
        FileStore(snapshot, outside_links=False).stat("vocab.txt")


def test_a_gguf_file_that_is_a_link_elsewhere_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "private.gguf").write_bytes(gguf_file(metadata(), float_tensors()))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.gguf").symlink_to("../home/private.gguf")
    assert pack(tmp_path / "model" / "model.gguf", tmp_path / "out") != 0
    assert "model.gguf in" in capsys.readouterr().err
    assert pack(tmp_path / "home" / "private.gguf", tmp_path / "out") == 0


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "config.json"])
def test_onnx_models_and_their_data_are_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("onnx")
    folder = tmp_path / "model"
    folder.mkdir()
    onnx_models.save(onnx_models.tabular(), folder / "model.onnx", external=True)
    (folder / "config.json").write_text("{}")
    data = next((path.name for path in folder.iterdir() if "data" in path.name), "")
    name = data if name.endswith(".data") else name
    assert name
    (tmp_path / "home").mkdir()
    shutil.move(folder / name, tmp_path / "home" / name)
    (folder / name).symlink_to(tmp_path / "home" / name)
    assert pack(folder, tmp_path / "out") != 0
    error = capsys.readouterr().err
    assert name in error
    assert "folder" in error


def test_an_adapters_file_is_refused_too(
    tmp_path: Path, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").symlink_to(secret)
    assert pack(tmp_path / "adapter", tmp_path / "out", "--base", str(tmp_path / "base")) != 0
    assert "adapter_config.json in" in capsys.readouterr().err
