"""Whole loads onto a CUDA device: in a process of their own, and what torch then sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_store
from tests.support.load import patience_s

from teneral.loader.artifact import open_artifact
from teneral.loader.format.manifest import Tier
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.launch import Task, launch
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.instance.helpers import opener

WAIT_S = patience_s(60)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cuda")
    made = {"two tiers": None, "three tiers": TierOptions(sketch_bits=1, draft_bits=4)}
    for name, tiers in made.items():
        pack(model_store(llama_contents(num_layers=3)), FileStore(folder / name), tiers=tiers)
    return {name: folder / name for name in made}


@pytest.fixture(params=["two tiers", "three tiers"])
def artifact(request: pytest.FixtureRequest, artifacts: dict[str, Path]) -> Path:
    return artifacts[request.param]


@pytest.fixture(params=[False, True], ids=["planes", "as stored"])
def as_stored(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[Order.EXACT, Order.DRAFT_FIRST])
def load(
    request: pytest.FixtureRequest, artifact: Path, as_stored: bool, tmp_path: Path
) -> Iterator[DeviceLoad]:
    timeline = Timeline()
    options, at = LoadOptions(order=request.param), timeline.started_at
    task = Task(str(artifact), None, SourceOptions(), options, at, device="cuda:0", as_stored=as_stored)
    launched = launch(task)
    with DeviceLoad.follow(launched, opener("cuda:0", str(tmp_path), timeline), timeline=timeline) as made:
        yield made


def test_the_weights_on_the_device_are_those_of_a_load_on_the_host(load: DeviceLoad, artifact: Path) -> None:
    source = FileStore(artifact)
    with WeightLoad(source, open_artifact(source)) as here:
        here.start()
        for group in load.manifest.groups:
            here.wait(group.index, timeout_s=WAIT_S)
            load.wait(group.index, timeout_s=WAIT_S)
        for tensor in load.manifest.tensors:
            begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
            assert load.read_back(tensor.group, begin, end) == here.slab(tensor.group)[begin:end].tobytes(), (
                tensor.name
            )
    assert load.wait_done(WAIT_S)


def test_torch_computes_with_the_very_memory_behind_each_gate(load: DeviceLoad, artifact: Path) -> None:
    import torch

    from teneral.runtime.backends.cuda.weights import DeviceWeights
    from teneral.runtime.weights import StreamedWeights

    source = FileStore(artifact)
    with WeightLoad(source, open_artifact(source)) as here:
        here.start()
        weights, expected = DeviceWeights(load), StreamedWeights(here)
        for name in load.manifest.by_name:
            gate = weights.gate([name])
            # Whatever is there by now: its kernel is launched, and may be refined behind.
            with gate.reading(Tier.DRAFT):
                weights.tensor(name).array.float().sum()
            gate()
            copied: torch.Tensor = weights.tensor(
                name
            ).array.clone()  # on torch's stream, behind what was placed
            expected.gate([name])()
            assert copied.device.type == "cuda"
            bits = copied.cpu().contiguous().view(torch.uint8).numpy()
            assert bits.tobytes() == expected.tensor(name).array.tobytes(), name
    assert load.wait_done(WAIT_S)
    statistics = load.device_statistics()
    assert statistics is not None
    assert statistics.num_images >= len(load.manifest.parts)
