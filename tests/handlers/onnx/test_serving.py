"""ONNX models behind a real server: /invoke, the Open Inference Protocol, functions, and a store that is slow."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.http_server import Server, running_server
from tests.support.onnx_artifacts import Packed, pack_model, pack_named
from tests.support.onnx_models import Array, expected
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.store_server import StoreServer

from teneral import cli
from teneral.handlers.function.handler import Handler
from teneral.loader.errors import TeneralError, UnavailableError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import ModelError
from teneral.runtime.instance.helpers import launch_helpers
from teneral.runtime.instance.instance import Instance
from teneral.runtime.onnx import sessions
from teneral.runtime.onnx.pack import pack_onnx
from teneral.runtime.onnx.spec import NO_TELEMETRY
from teneral.runtime.onnx.start import import_ahead

Context = Any


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_named("bert", tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_named("fp16", tmp_path_factory.mktemp("onnx"))


def serving(packed: Packed, handler: Any = None, **settings: Any) -> AbstractAsyncContextManager[Server]:
    settings = {"model": str(packed.artifact), "name": "org/net", "threads": 1} | settings
    return running_server(
        Instance(ServeConfig(**settings)), handler=None if handler is None else Handler(handler)
    )


def either(packed: Packed, inputs: dict[str, Array], name: str) -> list[bytes]:
    """The bits of an output, of segments and of the whole session."""
    return [
        expected(packed.path, inputs, while_loading=while_loading)[name].tobytes()
        for while_loading in (True, False)
    ]


async def test_invoke_takes_nested_lists_and_gives_them(bert: Packed) -> None:
    inputs = bert.made.inputs
    body = {"inputs": {name: array.tolist() for name, array in inputs.items()}}
    async with serving(bert) as server:
        answer = await server.post("/invoke", body)
        assert answer.status == 200, answer.body
        assert answer.json["model"] == "org/net"
        assert set(answer.json["outputs"]) == {"sentence_embedding", "logits"}
        got = np.array(answer.json["outputs"]["sentence_embedding"], "f4")
        assert got.tobytes() in either(bert, inputs, "sentence_embedding")
        answer = await server.post("/invoke", {**body, "outputs": ["sentence_embedding"]})
        assert list(answer.json["outputs"]) == ["sentence_embedding"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": {"input_ids": [[1]]}}, "the input 'attention_mask' is missing"),
        ({"inputs": {"input_ids": [1], "attention_mask": [[1]]}}, "the model takes [batch, tokens]"),
        ({"inputs": [1]}, "an event for an ONNX model is"),
        ({"inputs": {"input_ids": [[1]], "attention_mask": [[1]]}, "outputs": ["x"]}, "outputs are some of"),
        ({"inputs": {"input_ids": [[500]], "attention_mask": [[1]]}}, "indices element out of data bounds"),
        ({"prompt": "Once"}, "an event for an ONNX model is"),
    ],
)
async def test_inputs_that_do_not_fit_are_refused(bert: Packed, body: Any, message: str) -> None:
    async with serving(bert) as server:
        answer = await server.post("/invoke", body)
    assert answer.status == 400, answer.body
    assert message in answer.json["error"]["message"]


async def test_the_open_inference_protocol(bert: Packed) -> None:
    inputs = bert.made.inputs
    async with serving(bert) as server:
        await server.post("/invoke", {"inputs": {name: array.tolist() for name, array in inputs.items()}})
        metadata = (await server.get("/v2/models/org/net")).json
        assert metadata["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
        assert metadata["outputs"][0] == {"name": "sentence_embedding", "datatype": "FP32", "shape": [-1, 64]}
        config = (await server.get("/v2/models/org/net/config")).json
        assert config["input"][0]["data_type"] == "TYPE_INT64"
        tensors = [
            {"name": name, "datatype": "INT64", "shape": list(array.shape), "data": array.ravel().tolist()}
            for name, array in inputs.items()
        ]
        answer = await server.post("/v2/models/org/net/infer", {"inputs": tensors})
        assert answer.status == 200, answer.body
        outputs = {output["name"]: output for output in answer.json["outputs"]}
        got = np.array(outputs["sentence_embedding"]["data"], "f4").reshape(2, 64)
        assert got.tobytes() in either(bert, inputs, "sentence_embedding")
        tensors[0]["datatype"] = "INT32"
        answer = await server.post("/v2/models/org/net/infer", {"inputs": tensors})
        assert (answer.status, "is INT32, but the model takes INT64" in answer.json["error"]) == (400, True)


async def test_half_precision_as_bytes(fp16: Packed) -> None:
    inputs = fp16.made.inputs
    data = inputs["x"].tobytes()
    request = {
        "inputs": [
            {"name": "x", "datatype": "FP16", "shape": [4, 64], "parameters": {"binary_data_size": len(data)}}
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    async with serving(fp16) as server:
        answer = await server.request("POST", "/v2/models/org/net/infer", data=head + data, headers=headers)
    assert answer.status == 200, answer.body
    assert answer.body[int(answer.headers["Inference-Header-Content-Length"]) :] in either(fp16, inputs, "y")


async def test_functions_run_the_model(bert: Packed) -> None:
    inputs = bert.made.inputs

    def handler(event: Any, context: Context) -> Any:
        return context.model.run(inputs)["sentence_embedding"].tolist()

    async def ahandler(event: Any, context: Context) -> Any:
        return (await context.model.arun(inputs))["sentence_embedding"].tolist()

    for function in (handler, ahandler):
        async with serving(bert, function) as server:
            answer = await server.post("/invoke", None)
            assert np.array(answer.json, "f4").tobytes() in either(bert, inputs, "sentence_embedding")


async def test_routes_of_texts_say_what_the_model_takes(bert: Packed) -> None:
    async with serving(bert) as server:
        answer = await server.post("/v1/embeddings", {"input": "x"})
        assert answer.status == 400
        assert "takes tensors" in answer.error["message"]
        answer = await server.post("/v1/completions", {"prompt": "x"})
        assert answer.status == 400


async def test_the_whole_session_takes_over(bert: Packed) -> None:
    body = {"inputs": {name: array.tolist() for name, array in bert.made.inputs.items()}}
    async with serving(bert) as server:
        runner = await asyncio.wrap_future(server.instance.onnx)
        await server.eventually(lambda: runner.statistics().is_whole)
        answer = await server.post("/invoke", body)
        got = np.array(answer.json["outputs"]["sentence_embedding"], "f4")
        wanted = expected(bert.path, bert.made.inputs)["sentence_embedding"]
        assert got.tobytes() == wanted.tobytes()
        metrics = (await server.get("/metrics")).body.decode()
        assert "teneral_onnxrunner_is_whole 1.0" in metrics


async def test_a_first_request_runs_while_weights_arrive(bert: Packed) -> None:
    inputs = bert.made.inputs
    body = {
        "inputs": {name: array.tolist() for name, array in inputs.items()},
        "outputs": ["sentence_embedding"],
    }
    source = PacedSource(bert.source)
    held = source.hold(reads_of(bert.manifest, bert.manifest.parts[-1]))
    instance = Instance(ServeConfig(model="held", name="org/net", threads=1), source=source)
    async with running_server(instance) as server:
        asking = asyncio.create_task(server.post("/invoke", body))
        await server.eventually(lambda: instance.timeline.first("execute", "segment 0") is not None)
        assert not instance.wait_exact(0)
        held.release()
        answer = await asking
    assert answer.status == 200, answer.body
    got = np.array(answer.json["outputs"]["sentence_embedding"], "f4")
    wanted = expected(bert.path, inputs, while_loading=True)["sentence_embedding"]
    assert got.tobytes() == wanted.tobytes()


async def test_a_store_that_is_slow(bert: Packed) -> None:
    body = {"inputs": {name: array.tolist() for name, array in bert.made.inputs.items()}}
    with StoreServer(bert.artifact.parent, rate_mb_s=2, latency_ms=5) as store:
        async with serving(bert, model=f"{store.url}/artifact") as server:
            assert (await server.post("/invoke", body)).status == 200


async def test_no_temporary_folder_is_left(
    bert: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = {"inputs": {name: array.tolist() for name, array in bert.made.inputs.items()}}
    async with serving(bert) as server:
        assert (await server.post("/invoke", body)).status == 200
        runner = server.instance.onnx.result()
        await server.eventually(lambda: runner.statistics().is_whole)
        assert list(tmp_path.iterdir()) == []


def test_a_local_model_without_a_tokenizer_takes_no_other_process(bert: Packed, tmp_path: Path) -> None:
    config = ServeConfig(model=str(bert.artifact))
    assert launch_helpers(config, Timeline()) is None
    with_texts = pack_model(bert.made, tmp_path, files={"tokenizer.json": b"{}"})
    for other in (config.replace(model=str(with_texts.artifact)), config.replace(loader="process")):
        launched = launch_helpers(other, Timeline())
        assert launched is not None
        launched.adopt(Timeline()).close()


def test_serving_sends_no_telemetry(tmp_path: Path) -> None:
    """ONNX Runtime's reporter would leave a file in the temporary folder."""
    program = (
        "from teneral.loader.timeline import Timeline; from teneral.runtime.onnx.start import import_ahead;"
        "import_ahead(Timeline()); import sys; print('onnxruntime' in sys.modules)"
    )
    variables = {name: value for name, value in os.environ.items() if name != NO_TELEMETRY}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), list(tmp_path.iterdir())) == ("True", [])


def test_the_environment_may_allow_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_TELEMETRY, "0")
    import_ahead(Timeline())  # it is imported already, without
    assert os.environ[NO_TELEMETRY] == "0"


def test_packing_sends_no_telemetry(bert: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NO_TELEMETRY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the reader's process, whose own this is not
    pack_onnx(str(bert.path), FileStore(tmp_path / "artifact"))
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


async def test_unloading_and_loading_again(bert: Packed) -> None:
    body = {"inputs": {name: array.tolist() for name, array in bert.made.inputs.items()}}
    async with serving(bert, model_control=True) as server:
        assert (await server.post("/invoke", body)).status == 200
        assert (await server.post("/v2/repository/models/org/net/unload")).status == 200
        assert (await server.post("/invoke", body)).status == 503
        assert (await server.post("/v2/repository/models/org/net/load")).status == 200
        assert (await server.post("/invoke", body)).status == 200


async def test_a_damaged_weight_fails_the_instance(bert: Packed, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(bert.artifact, tmp_path / "artifact")
    (blob,) = (tmp_path / "artifact").rglob("*.bin")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with Instance(ServeConfig(model=str(tmp_path / "artifact"), threads=1)) as instance:
        failure = await asyncio.to_thread(instance.ended.result, 60)
    assert isinstance(failure, TeneralError)


@pytest.mark.parametrize("kind", [ModelError, UnavailableError])
async def test_a_whole_session_that_cannot_be_made_leaves_the_segments(
    bert: Packed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[TeneralError],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise kind("no whole session today")

    monkeypatch.setattr(sessions.WholeModel, "__init__", refuse)
    body = {"inputs": {name: array.tolist() for name, array in bert.made.inputs.items()}}
    async with serving(bert) as server:
        await server.eventually(lambda: "no whole session today" in caplog.text)
        assert (await server.post("/invoke", body)).status == 200
    with Instance(ServeConfig(model=str(bert.artifact), threads=1, ort_providers="cpu")) as instance:
        failure = await asyncio.to_thread(instance.ended.result, WAIT_S)
    assert isinstance(failure, kind)


def test_without_onnxruntime_the_extra_is_named(bert: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runner", "sessions"):
        monkeypatch.delitem(sys.modules, f"teneral.runtime.onnx.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with Instance(ServeConfig(model=str(bert.artifact), threads=1)) as instance:
        failure = instance.ended.result(WAIT_S)
    assert failure is not None
    assert "onnxruntime is not installed" in str(failure)
    assert "teneral[onnx]" in failure.hint


def test_pack_verify_and_inspect_by_the_command_line(
    bert: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.run(["pack", str(bert.path), str(out), "--quiet"]) == 0
    assert cli.run(["verify", str(out), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", str(out), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["metadata"] == {"format": "onnx"}
    assert [group["name"] for group in value["groups"]] == ["segments.0"]
    assert cli.run(["pack", str(bert.path.parent), str(out), "--quiet"]) == 6
    assert cli.run(["pack", str(bert.path), str(tmp_path / "b"), "--quantize", "int8"]) == 2
    assert cli.run(["pack", str(bert.path.parent / "none.onnx"), str(tmp_path / "b"), "--quiet"]) == 3


def test_a_model_in_a_store_is_packed(bert: Packed, tmp_path: Path) -> None:
    with StoreServer(bert.path.parent.parent) as store:
        assert cli.run(["pack", f"{store.url}/model/model.onnx", str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / "manifest.json").exists()


def test_a_function_is_invoked_once_over_an_unknown_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    assert cli.run(["serve", str(tmp_path / "model.pt"), "--port", "0"]) == 2
    assert "torch.onnx.export" in capsys.readouterr().err
