"""Twelve models of real kinds and sizes, exported by torch with random weights: equal to ONNX Runtime bit for bit,
through the segments and through the whole session.

Exporting takes onnxscript, which is not everywhere: scripts/conformance-onnx installs it and runs these tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.onnx_models import Made, Net, expected, save

from teneral.loader.artifact import open_artifact
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.runtime.files import ModelFiles
from teneral.runtime.onnx.pack import pack_onnx
from teneral.runtime.onnx.sessions import CPU_PROVIDER, Run, SegmentedModel, WholeModel
from teneral.runtime.onnx.spec import FILE_NAME, parse_spec

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TENERAL_ONNX_EXPORTS"), reason="run scripts/conformance-onnx"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of the exporter
]

Inputs = dict[str, np.ndarray[Any, Any]]


def pixels(size: int, batch: int = 2, dtype: str = "f4") -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((batch, 3, size, size)).astype(dtype)


def export(model: Any, inputs: Inputs, folder: Path, *, batched: bool = True) -> tuple[Path, Inputs]:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    shapes = {name: {0: torch.export.Dim("batch")} for name in inputs} if batched else None
    torch.onnx.export(
        model.eval(),
        (),
        str(path),
        kwargs=tensors,
        dynamo=True,
        external_data=True,
        dynamic_shapes=shapes,
        verbose=False,
        input_names=list(inputs),
    )
    return path, inputs


def vision(name: str, **settings: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**settings)
    config.return_dict = True
    return kind(config)


def resnet(folder: Path) -> tuple[Path, Inputs]:
    return export(vision("ResNetForImageClassification"), {"pixel_values": pixels(224)}, folder)


def mobilenet(folder: Path) -> tuple[Path, Inputs]:
    return export(vision("MobileNetV2ForImageClassification"), {"pixel_values": pixels(224)}, folder)


def vit(folder: Path) -> tuple[Path, Inputs]:
    return export(vision("ViTForImageClassification"), {"pixel_values": pixels(224)}, folder)


def clip(folder: Path) -> tuple[Path, Inputs]:
    return export(vision("CLIPVisionModelWithProjection"), {"pixel_values": pixels(224)}, folder)


def texts() -> Inputs:
    ids = np.random.default_rng(0).integers(5, 30_000, (2, 24))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def bert(folder: Path) -> tuple[Path, Inputs]:
    return export(vision("BertModel"), texts(), folder)


def minilm(folder: Path) -> tuple[Path, Inputs]:
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
    return export(vision("BertModel", **shape), texts(), folder)


def whisper(folder: Path) -> tuple[Path, Inputs]:
    model = vision("WhisperModel").encoder
    mel = np.random.default_rng(0).standard_normal((1, 80, 3000)).astype("f4")
    return export(model, {"input_features": mel}, folder, batched=False)


def detector(folder: Path) -> tuple[Path, Inputs]:
    model = vision("YolosForObjectDetection", num_hidden_layers=4, image_size=[128, 128])
    return export(model, {"pixel_values": pixels(128, 1)}, folder, batched=False)


def segmenter(folder: Path) -> tuple[Path, Inputs]:
    return export(
        vision("SegformerForSemanticSegmentation"), {"pixel_values": pixels(128, 1)}, folder, batched=False
    )


def tabular(folder: Path) -> tuple[Path, Inputs]:
    import torch

    layers: list[Any] = []
    for width, out in ((64, 512), (512, 512), (512, 8)):
        layers += [torch.nn.Linear(width, out), torch.nn.BatchNorm1d(out), torch.nn.ReLU()]

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*layers)

        def forward(self, rows: Any) -> Any:
            return self.layers(rows).softmax(-1)

    rows = np.random.default_rng(0).standard_normal((5, 64)).astype("f4")
    return export(Table(), {"rows": rows}, folder)


def int8(folder: Path) -> tuple[Path, Inputs]:
    """The ResNet, as ONNX Runtime's own tools quantise it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    path, inputs = resnet(folder / "float")

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [inputs]

        def get_next(self) -> Inputs | None:
            return self.left.pop() if self.left else None

    quantize_static(path, folder / "model.onnx", Reader(), quant_format=QuantFormat.QDQ, per_channel=True)
    return folder / "model.onnx", inputs


def fp16(folder: Path) -> tuple[Path, Inputs]:
    model = vision("ViTForImageClassification", num_hidden_layers=4).half()
    return export(model, {"pixel_values": pixels(224, 1, "f2")}, folder, batched=False)


def deep(folder: Path) -> tuple[Path, Inputs]:
    """A graph by hand of opset 23."""
    net = Net(opset=23)
    x = net.input("x", ["n", 256])
    for _ in range(40):
        x = net.op("Add", x, net.op("Tanh", net.linear(x, 256, 256)))
    net.op("Identity", x, name="y")
    net.output("y", ["n", 256])
    inputs = {"x": np.random.default_rng(0).standard_normal((3, 256)).astype("f4")}
    return save(Made(net.model(), inputs), folder / "model.onnx", external=True), inputs


EXPORTS: list[Callable[[Path], tuple[Path, Inputs]]] = [
    resnet, mobilenet, vit, clip, bert, minilm, whisper, detector, segmenter, tabular, int8, fp16, deep,
]  # fmt: skip


@pytest.mark.parametrize("make", EXPORTS, ids=lambda make: make.__name__)
def test_an_exported_model_computes_what_onnxruntime_does(make: Any, tmp_path: Path) -> None:
    path, inputs = make(tmp_path / "model")
    result = pack_onnx(str(path), FileStore(tmp_path / "artifact"))
    source = FileStore(tmp_path / "artifact")
    manifest = open_artifact(source)
    files = ModelFiles(source, manifest, LoadOptions())
    data = files.read(FILE_NAME)
    assert data is not None
    spec = parse_spec(data, manifest)
    with WeightLoad(source, manifest) as load:
        segments = SegmentedModel(spec, files, load, threads=1, timeline=Timeline())
        segments.prepare()
        load.start()
        early = segments.run(inputs, Run())
        whole = WholeModel(spec, files, load, threads=1, providers=[CPU_PROVIDER])
        segments.close()
        load.discard()
    late = whole.run(inputs, Run())
    wanted = expected(path, inputs, while_loading=True)
    default = expected(path, inputs)
    same = {name: early[name].tobytes() == array.tobytes() for name, array in wanted.items()}
    same_late = {name: late[name].tobytes() == array.tobytes() for name, array in default.items()}
    print(
        f"{make.__name__}: {len(spec.segments)} segments, {result.source_bytes / 1e6:.1f} MB, "
        f"crossing {[len(segment.inputs) for segment in spec.segments]}, segments {all(same.values())}, "
        f"whole {all(same_late.values())}"
    )
    assert all(same.values()), same
    assert all(same_late.values()), same_late
