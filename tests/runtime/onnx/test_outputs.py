"""Packed ONNX models compute what ONNX Runtime computes of the original file, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.support.onnx_artifacts import Packed, pack_model, pack_named
from tests.support.onnx_models import MODELS, Array, Made, Net, expected
from tests.support.paced import WAIT_S, PacedSource, reads_of

from teneral.loader.errors import TeneralError, UnavailableError
from teneral.loader.load.load import WeightLoad
from teneral.loader.timeline import Timeline
from teneral.runtime.errors import CancelledError, ModelError
from teneral.runtime.onnx.sessions import (
    CPU_PROVIDER,
    Placeholder,
    Run,
    SegmentedModel,
    WholeModel,
    check_providers,
)
from teneral.runtime.onnx.spec import WHOLE_NAME


@pytest.fixture(scope="module", params=MODELS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_named(request.param, tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_named("bert", tmp_path_factory.mktemp("onnx"))


def same_bits(got: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return list(got) == list(wanted) and all(
        got[name].dtype == wanted[name].dtype
        and got[name].shape == wanted[name].shape
        and got[name].tobytes() == wanted[name].tobytes()
        for name in wanted
    )


def segmented(packed: Packed, load: WeightLoad, source: Any) -> SegmentedModel:
    return SegmentedModel(packed.spec, packed.files(source), load, threads=1, timeline=Timeline())


def test_segments_and_the_whole_session_compute_what_onnxruntime_does(packed: Packed) -> None:
    source, inputs = packed.source, packed.made.inputs
    with WeightLoad(source, packed.manifest) as load:
        model = segmented(packed, load, source)
        model.prepare()  # over memory that is empty
        load.start()
        assert same_bits(model.run(inputs, Run()), expected(packed.path, inputs, while_loading=True))
        whole = WholeModel(packed.spec, packed.files(source), load, threads=1, providers=[CPU_PROVIDER])
        model.close()
        load.discard()
        assert not load.slab(0).any()
    assert same_bits(whole.run(inputs, Run()), expected(packed.path, inputs))


def test_scales_of_fp16_products_stay_where_they_were(tmp_path: Path) -> None:
    """Attention has such scales. A scale that is no power of two rounds elsewhere when it moves behind the product."""
    net = Net()
    x = net.input("x", ["n", 64, 64], onnx.TensorProto.FLOAT16)
    scale = net.constant(np.array(0.3535, "f2"))
    queries, keys = (net.op("Mul", net.linear(x, 64, 64, dtype="f2"), scale) for _ in range(2))
    net.op("MatMul", queries, net.op("Transpose", keys, perm=[0, 2, 1]), name="y")
    net.output("y", ["n", 64, 64], onnx.TensorProto.FLOAT16)
    inputs = {"x": np.random.default_rng(1).standard_normal((32, 64, 64)).astype("f2")}
    packed = pack_model(Made(net.model(), inputs), tmp_path)
    with WeightLoad(packed.source, packed.manifest) as load:
        load.start()
        for group in {tensor.group for tensor in packed.manifest.tensors}:
            load.wait(group, timeout_s=WAIT_S)
        files = packed.files(packed.source)
        whole = WholeModel(packed.spec, files, load, threads=1, providers=[CPU_PROVIDER])
    assert same_bits(whole.run(inputs, Run()), expected(packed.path, inputs))


def test_weights_are_stored_once_in_the_order_of_their_use(packed: Packed) -> None:
    manifest, spec = packed.manifest, packed.spec
    assert [tensor.name for tensor in manifest.tensors] == list(spec.weights)
    by_name = manifest.by_name
    for number, segment in enumerate(spec.segments):
        assert all(by_name[name].group <= number for name in segment.weights)
    assert all(tensor.size_bytes >= 1024 for tensor in manifest.tensors)


def test_the_whole_graph_keeps_the_shapes_that_were_known(tmp_path: Path) -> None:
    packed = pack_named("vit", tmp_path)
    known = {value.name for value in onnx.load(packed.path, load_external_data=False).graph.value_info}
    data = packed.files(packed.source).read(WHOLE_NAME)
    assert data is not None
    kept = onnx.ModelProto.FromString(data).graph
    assert known & {name for node in kept.node for name in node.output} <= {
        value.name for value in kept.value_info
    }
    assert len(kept.value_info) > 10


def test_a_run_follows_the_weights(bert: Packed) -> None:
    source = PacedSource(bert.source)
    manifest, inputs = bert.manifest, bert.made.inputs
    held = [source.hold(reads_of(manifest, part)) for part in manifest.parts]
    timeline, outcome, waits = Timeline(), [], threading.Event()
    with WeightLoad(source, manifest) as load:
        files = bert.files(source)
        model = SegmentedModel(bert.spec, files, load, threads=1, timeline=timeline, on_wait=waits.set)
        load.start()
        thread = threading.Thread(target=lambda: outcome.append(model.run(inputs, Run())))
        thread.start()
        for number, hold in enumerate(held):
            if number:
                wait_for_span(timeline, f"segment {number - 1}")
            assert timeline.first("execute", f"segment {number}") is None
            hold.release()
        thread.join(WAIT_S)
    model.close()
    assert waits.is_set()
    assert same_bits(outcome[0], expected(bert.path, inputs, while_loading=True))


def wait_for_span(timeline: Timeline, name: str) -> None:
    event = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if timeline.first("execute", name) is not None:
            return
        event.wait(0.005)
    raise TimeoutError(name)


def test_a_cancelled_run_stops_waiting_for_weights(bert: Packed) -> None:
    source = PacedSource(bert.source)
    source.hold(reads_of(bert.manifest, bert.manifest.parts[-1]))
    run, outcome = Run(), []

    def work() -> None:
        try:
            model.run(bert.made.inputs, run)
        except TeneralError as error:
            outcome.append(error)

    load = WeightLoad(source, bert.manifest)
    model = segmented(bert, load, source)
    load.start()
    thread = threading.Thread(target=work)
    thread.start()
    load.wait(0, timeout_s=WAIT_S)
    run.cancel()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], CancelledError)
    load.close()
    model.close()


def test_a_load_that_fails_is_what_a_run_raises(bert: Packed) -> None:
    source = PacedSource(bert.source)
    source.fail(
        lambda: UnavailableError("the store is gone"), reads_of(bert.manifest, bert.manifest.parts[-1])
    )
    with WeightLoad(source, bert.manifest) as load:
        model = segmented(bert, load, source)
        load.start()
        with pytest.raises(UnavailableError, match="the store is gone"):
            model.run(bert.made.inputs, Run())
    model.close()


def test_constants_without_weights_make_one_segment(tmp_path: Path) -> None:
    net = Net()
    net.op("Add", net.input("x", ["n", 2]), net.constant(np.array([1, 2], "f4")), name="y")
    net.output("y", ["n", 2])
    packed = pack_model(Made(net.model(), {"x": np.ones((1, 2), "f4")}), tmp_path)
    source = packed.source
    with WeightLoad(source, packed.manifest) as load:
        model = segmented(packed, load, source)
        load.start()
        assert model.run(packed.made.inputs, Run())["y"].tolist() == [[2, 3]]
        model.close()
        whole = WholeModel(packed.spec, packed.files(source), load, threads=1, providers=[CPU_PROVIDER])
    assert whole.run(packed.made.inputs, Run())["y"].tolist() == [[2, 3]]


def test_a_provider_that_is_not_installed_is_named() -> None:
    assert check_providers(["cpu"]) == [CPU_PROVIDER]
    with pytest.raises(ModelError, match="no provider for 'tensorrt'"):
        check_providers(["tensorrt", "cpu"])


def test_a_placeholder_takes_no_room_and_goes() -> None:
    placeholder = Placeholder(1 << 40)
    file = Path(placeholder.path) / "weights"
    assert (file.stat().st_size, file.stat().st_blocks) == (1 << 40, 0)
    placeholder.remove()
    placeholder.remove()
    assert not file.parent.exists()


_EXIT_WHILE_SESSIONS_ARE_MADE = """
import sys, threading, time
from pathlib import Path
from tests.support.onnx_artifacts import Packed
from teneral.loader.load.load import WeightLoad
from teneral.runtime.onnx.sessions import CPU_PROVIDER, WholeModel

packed = Packed(None, None, Path(sys.argv[1]))
load = WeightLoad(packed.source, packed.manifest)
load.start()
for group in {tensor.group for tensor in packed.manifest.tensors}:
    load.wait(group)

def make():
    while True:
        WholeModel(packed.spec, packed.files(packed.source), load, threads=1, providers=[CPU_PROVIDER])
        made.set()

made = threading.Event()
threading.Thread(target=make, daemon=True).start()
made.wait()
"""


def test_a_process_that_ends_while_a_session_is_made_exits_normally(bert: Packed) -> None:
    command = [sys.executable, "-c", _EXIT_WHILE_SESSIONS_ARE_MADE, str(bert.artifact)]
    for _ in range(3):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
