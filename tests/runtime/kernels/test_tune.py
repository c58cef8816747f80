"""`teneral tune` measures once; servers of the same artifact on such machines do not."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader.artifact import open_artifact
from teneral.loader.sources.file import FileStore
from teneral.loader.stream.load import WeightLoad
from teneral.loader.stream.options import LoadOptions
from teneral.loader.timeline import Timeline
from teneral.runtime.config import ServeConfig
from teneral.runtime.files import ModelFiles
from teneral.runtime.instance import Instance
from teneral.runtime.kernels import onednn
from teneral.runtime.kernels import tune as module
from teneral.runtime.kernels.copies import ROUNDING
from teneral.runtime.kernels.prepare import prepare_backends
from teneral.runtime.kernels.tuning import FILE_NAME, Machine, parse_tuning, read_figures
from teneral.runtime.loading import wait_exact
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.quantized import QuantizedLinear
from teneral.runtime.weights import StreamedWeights

WAIT_S = 120.0

pytestmark = pytest.mark.skipif(
    not onednn.can_pack(Linear(torch.zeros(64, 64, dtype=torch.bfloat16))),
    reason="torch packs no bf16 on this processor",
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, intermediate_size=128)
    assert cli.run(["pack", str(folder / "plain"), str(folder / "artifact"), "--quiet"]) == 0
    return folder / "artifact"


@pytest.fixture
def artifact(packed: Path) -> Path:
    (packed / FILE_NAME).unlink(missing_ok=True)
    return packed


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without numba's kernels, so that all that is measured is products."""
    folder = tmp_path_factory.mktemp("quantised")
    shape = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 1}
    save_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **shape)
    command = ["pack", str(folder / "plain"), str(folder / "artifact"), "--quantize", "int8", "--quiet"]
    assert cli.run(command) == 0
    return folder / "artifact"


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tune(artifact: Path, *flags: str) -> int:
    return cli.run(["tune", str(artifact), "--threads", "1", "--quiet", *flags])


def prepared(artifact: Path, *spans: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """What the timeline of a server says of these spans."""
    config = ServeConfig(model=str(artifact), loader="thread", kv_bytes=8 << 20, threads=1, **settings)
    with Instance(config) as instance:
        assert instance.wait_exact(WAIT_S)
        end_s = time.monotonic() + WAIT_S
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(spans) and time.monotonic() < end_s:
            said = {name: instance.timeline.first("process", name) for name in spans}
            found = {name: span.attributes for name, span in said.items() if span is not None}
            time.sleep(0.02)
    return found


def test_a_server_uses_what_was_kept_and_does_not_measure(artifact, capsys):
    assert tune(artifact) == 0
    printed = capsys.readouterr().out
    assert f"{artifact.as_posix()}/{FILE_NAME}" in printed
    assert "onednn" in printed

    (said,) = prepared(artifact, "pack weights", kernels=False, prepack_bytes=1 << 30).values()

    kinds = [value for key, value in said.items() if key.startswith(("bfloat16", "head")) and ": " not in key]
    assert len(kinds) == 5
    assert all(value.endswith("(kept beside the model)") for value in kinds)


def test_compiled_kernels_are_chosen_by_what_was_kept(artifact):
    pytest.importorskip("numba", reason="kernels need the extra [cpu]")
    (said,) = prepared(artifact, "compile kernels").values()
    assert said["choice"] == "measured"
    assert tune(artifact) == 0

    (said,) = prepared(artifact, "compile kernels").values()

    assert said["choice"] == "kept beside the model"
    figures = read_figures(FileStore(artifact), Machine.here(1))
    (layer,) = [by_size for kind, by_size in figures.items() if kind.startswith("layer: ")]
    kernels_ms, torch_ms = layer[8]["kernels"] / 1e6, layer[8]["torch"] / 1e6
    assert said["8 rows, ms a layer"] == f"{kernels_ms:.2f}, torch {torch_ms:.2f}"


def test_every_library_that_is_here_is_measured_and_a_server_chooses_among_them(quantised, capsys):
    weight = torch.zeros(96, 96, dtype=torch.int8)
    here = [
        backend
        for backend, library in ROUNDING.items()
        if library.can_pack(QuantizedLinear(weight, torch.ones(96, 1)))
    ]
    if not here:
        pytest.skip("neither onnxruntime nor openvino is installed")
    assert tune(quantised) == 0
    printed = capsys.readouterr().out
    figures = read_figures(FileStore(quantised), Machine.here(1))
    for backend in here:
        assert f"{backend} " in printed
        assert f", {Machine.here(1).libraries}; entries" in printed
    products = {kind: by_size for kind, by_size in figures.items() if not kind.startswith("layer")}
    assert len(products) == 5
    for by_size in products.values():
        assert all(set(times) == {"torch", *here} for times in by_size.values())

    (said,) = prepared(quantised, "pack weights", kernels=False, prepack_bytes=1 << 30).values()

    for kind in products:
        assert said[kind].endswith("(kept beside the model)")
        assert not [said[f"{kind}: {backend}"] for backend in here if f"{kind}: {backend}" in said]


def test_what_another_machine_measured_is_kept_and_not_used(artifact):
    assert tune(artifact) == 0
    document = json.loads((artifact / FILE_NAME).read_text())
    document["entries"][0]["machine"]["cpu"] = "another processor"
    (artifact / FILE_NAME).write_text(json.dumps(document))

    (said,) = prepared(artifact, "pack weights", kernels=False, prepack_bytes=1 << 30).values()
    assert any("(measured)" in str(value) for value in said.values())
    assert not any("(kept" in str(value) for value in said.values())

    assert tune(artifact, "--json") == 0
    entries = parse_tuning((artifact / FILE_NAME).read_bytes())
    assert [entry.machine.cpu == "another processor" for entry in entries] == [True, False]


def test_a_hostile_file_changes_nothing_but_the_log(artifact, caplog, monkeypatch):
    (artifact / FILE_NAME).write_text('{"format": "teneral-tuning", "version": NaN, "entries": []}')
    with caplog.at_level(logging.WARNING):
        (said,) = prepared(artifact, "pack weights", kernels=False, prepack_bytes=1 << 30).values()
    assert any("(measured)" in str(value) for value in said.values())
    assert any(FILE_NAME in record.getMessage() and "NaN" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("measured"))
    assert tune(artifact) == 9  # nor is it replaced, which is said before anything is measured
    assert "NaN" in (artifact / FILE_NAME).read_text()


def test_an_artifact_that_was_tuned_is_as_sound_as_before(artifact, tmp_path):
    assert tune(artifact) == 0
    assert cli.run(["verify", str(artifact), "--quiet"]) == 0
    assert cli.run(["unpack", str(artifact), str(tmp_path / "out"), "--quiet"]) == 0
    assert not (tmp_path / "out" / FILE_NAME).exists()


class CountedStore(FileStore):
    """Remembers what was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names: list[str] = []

    def read(self, name: str, *, max_bytes: int) -> Any:
        self.names.append(name)
        return super().read(name, max_bytes=max_bytes)


@pytest.mark.parametrize(("prepack_bytes", "num_reads"), [(0, 0), (1 << 30, 1)])
def test_the_file_is_read_once_and_only_where_there_is_a_choice(artifact, prepack_bytes, num_reads):
    source = CountedStore(artifact)
    manifest = open_artifact(source)
    config = ServeConfig(model="model", threads=1, kernels=False, prepack_bytes=prepack_bytes)
    with WeightLoad(source, manifest) as load:
        load.start()
        files = ModelFiles(source, manifest, LoadOptions())
        model = build_model(files.json("config.json"), StreamedWeights(load))
        wait_exact(load)
        assert isinstance(model, Decoder)
        prepare_backends(
            model,
            config,
            source,
            pool_bytes=1 << 20,
            is_awaited=lambda: False,
            timeline=Timeline(),
            ended=threading.Event(),
        )
    assert source.names.count(FILE_NAME) == num_reads


def test_an_encoder_has_nothing_to_tune(tmp_path, capsys):
    save_tiny("bert", tmp_path / "plain")
    assert tune(tmp_path / "plain") == 12
    assert "embeddings" in capsys.readouterr().err
    assert not (tmp_path / "plain" / FILE_NAME).exists()


@pytest.mark.parametrize("threads", ["0", "2000"])
def test_a_number_of_threads_that_cannot_be_meant_is_refused(artifact, threads, capsys):
    assert cli.run(["tune", str(artifact), "--threads", threads, "--quiet"]) == 2
    assert "threads" in capsys.readouterr().err
