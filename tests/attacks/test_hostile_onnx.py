"""Hostile and unsuitable ONNX files: each is refused with an error that says what is wrong, and leaves nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.support.onnx_artifacts import Packed, pack_named
from tests.support.onnx_models import Made, Net, save

from teneral import cli
from teneral.loader.artifact import open_artifact
from teneral.loader.errors import CheckpointError, UsageError
from teneral.loader.load.load import WeightLoad
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.errors import ModelError
from teneral.runtime.onnx import pack as packing
from teneral.runtime.onnx.check import check_model, read_model
from teneral.runtime.onnx.graph import prepare
from teneral.runtime.onnx.pack import pack_onnx, refuse_other_formats
from teneral.runtime.onnx.sessions import CPU_PROVIDER, WholeModel
from teneral.runtime.onnx.spec import parse_spec


def tiny() -> Net:
    net = Net()
    net.op("MatMul", net.input("x", ["n", 32]), net.weight(32, 32, prefix="w"), name="y")
    net.output("y", ["n", 32])
    return net


def with_external(tmp_path: Path, **fields: str) -> Path:
    """A model whose one weight lies where `fields` say."""
    path = save(Made(tiny().model(), {}), tmp_path / "model.onnx", external=True)
    model = onnx.load(path, load_external_data=False)
    (tensor,) = model.graph.initializer
    have = {entry.key: entry.value for entry in tensor.external_data} | fields
    del tensor.external_data[:]
    for key, value in have.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "../secret"}, "not a file of the model's folder"),
        ({"location": "/etc/passwd"}, "not a file of the model's folder"),
        ({"location": "a\\..\\b"}, "not a file of the model's folder"),
        ({"location": ""}, "not a file of the model's folder"),
        ({"location": "link"}, "not a file of the model's folder"),
        ({"location": "absent.data"}, "which is missing"),
        ({"location": "folder"}, "not a file of the model's folder"),
        ({"offset": "-4096"}, "no valid offset"),
        ({"offset": "9" * 30}, "no valid offset"),
        ({"offset": "4"}, "ends at byte 4100 of model.data, which has 4096"),
        ({"length": "4"}, "has 4 bytes of external data, and its shape says 4096"),
        ({"length": "1e3"}, "no valid length"),
    ],
)
def test_external_data_stay_in_the_folder_and_have_the_size_of_their_shape(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    path = with_external(tmp_path, **fields)
    (tmp_path / "folder").mkdir()
    os.symlink("/etc/passwd", tmp_path / "link")
    with pytest.raises(CheckpointError, match=message):
        check_model(read_model(path), tmp_path)


def set_opset(model: onnx.ModelProto, version: int) -> None:
    model.opset_import[0].version = version


def set_dims(model: onnx.ModelProto, *dims: int) -> None:
    model.graph.initializer[0].dims[:] = dims


def clear_data(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].ClearField("raw_data")
    set_dims(model, 1 << 30, 1 << 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: set_opset(model, 10), "its opset is 10, and 11 to 23 are supported"),
        (lambda model: set_opset(model, 99), "its opset is 99"),
        (lambda model: set_dims(model, 32, 33), "has 4096 bytes, and its shape says 4224"),
        (lambda model: set_dims(model, -1, 32), "a shape that no tensor can have"),
        (lambda model: set_dims(model, *[1 << 40] * 8), "a huge shape"),
        (clear_data, "a huge shape"),
        (lambda model: model.graph.initializer.append(model.graph.initializer[0]), "or one that another has"),
    ],
)
def test_sizes_shapes_and_versions_are_checked(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = tiny().model()
    change(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=message):
        check_model(read_model(path), tmp_path)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"PK\3\4 a zip file", os.urandom(1000)])
def test_what_is_no_onnx_file_is_named_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="not an ONNX model"):
        read_model(path)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    net = tiny()
    net.nodes += [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    path = save(Made(net.model(), {}), tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="cannot be packed"):
        prepare(path, tmp_path / "out", 1)


def test_an_operator_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    net = tiny()
    net.op("LaunchRockets", "y", name="z", domain="com.example")
    net.domains["com.example"] = 1
    net.output("z", ["n", 32])
    path = save(Made(net.model(), {}), tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"refuses it: .*LaunchRockets"):
        prepare(path, tmp_path / "out", 1)


def test_a_constant_that_would_take_all_memory_is_not_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SPARE_BYTES", 512 << 20)
    net = Net()
    shape = net.constant(np.array([1 << 20, 1 << 14]))  # 64 GiB
    huge = net.op("ConstantOfShape", shape)
    net.op("Add", net.input("x", ["n"]), net.op("ReduceSum", huge, keepdims=0), name="y")
    net.output("y", ["n"])
    path = save(Made(net.model(), {}), tmp_path / "model.onnx")
    try:
        pack_onnx(str(path), FileStore(tmp_path / "artifact"))
    except CheckpointError:
        assert not (tmp_path / "artifact" / "manifest.json").exists()
    # Or ONNX Runtime has left the constant for a run of the model.
    files = [file for file in (tmp_path / "artifact").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1 << 20


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.pt", "torch.onnx.export"),
        ("model.pth", "torch.onnx.export"),
        ("model.torchscript", "torch.onnx.export"),
        ("frozen.pb", "tf2onnx.convert --saved-model"),
        ("saved", "tf2onnx.convert --saved-model"),
    ],
)
def test_models_of_other_frameworks_get_the_export_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    path = tmp_path / name
    if name == "saved":
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"x")
    else:
        path.write_bytes(b"x")
    with pytest.raises(UsageError):
        refuse_other_formats(str(path))
    assert cli.run(["pack", str(path), str(tmp_path / "out")]) == 2
    assert command in capsys.readouterr().err


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_named("tabular", tmp_path_factory.mktemp("onnx"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(version=2), "another version"),
        (lambda spec: spec["segments"].clear(), "no segments"),
        (lambda spec: spec["segments"][0]["inputs"].append("ghost"), "nothing before it makes"),
        (lambda spec: spec["segments"][0]["weights"].append("ghost"), "a tensor 'ghost' that the artifact"),
        (lambda spec: spec["segments"][0].update(file="../whole.onnx"), "does not have"),
        (lambda spec: spec["segments"][0].update(outputs=[]), "no segment makes the output"),
        (lambda spec: spec["segments"].append(spec["segments"][0]), "once more"),
        (lambda spec: spec["inputs"].append(spec["inputs"][0]), "two inputs have one name"),
        (lambda spec: spec["inputs"][0].update(type="sequence"), "no type that can be served"),
        (lambda spec: spec["inputs"][0].update(shape=[-1]), "a shape is not a list"),
        (lambda spec: spec["inputs"][0].update(name="x" * 2000), "a name is not a text"),
        (lambda spec: spec.update(segments=[spec["segments"][0]] * 100), "not a list of up to"),
    ],
)
def test_a_description_that_cannot_be_true_is_refused(
    packed: Packed, change: Callable[[dict], object], message: str
) -> None:
    spec = json.loads(packed.spec.dump())
    change(spec)
    with pytest.raises(CheckpointError, match=message):
        parse_spec(json.dumps(spec).encode(), packed.manifest)


def test_a_skeleton_that_names_another_file_is_refused(packed: Packed) -> None:
    class Other:
        def read(self, name: str) -> bytes:
            model = tiny().model()
            (tensor,) = model.graph.initializer
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "../../../../etc/passwd"), ("offset", "0"), ("length", "4096")):
                tensor.external_data.add(key=key, value=value)
            data: bytes = model.SerializeToString()
            return data

    with WeightLoad(packed.source, open_artifact(packed.source)) as load:
        load.start()
        load.wait(0)
        with pytest.raises(ModelError, match=r"refuses whole\.onnx"):
            WholeModel(packed.spec, Other(), load, threads=1, providers=[CPU_PROVIDER])  # type: ignore[arg-type]
