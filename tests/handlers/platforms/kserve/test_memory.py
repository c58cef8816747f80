"""Real instances, from a model directory: what was unloaded is really gone, and comes back the same."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.inspection import model_of
from tests.support.tiny_models import save_tiny

from teneral.loader.timeline import Timeline
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.helpers import launch_helpers
from teneral.runtime.instance.instance import Instance
from teneral.runtime.synth import synthesize

LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"
INFER = "/v2/models/m/infer"
ONCE = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon"]}


def resident_bytes() -> int:
    """Of this process: its own memory, the shared one that weights lie in, and the files that it maps."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem", "RssFile"))


def config_of(model: Path, **settings: Any) -> ServeConfig:
    return ServeConfig(
        model=str(model),
        name="m",
        kv_bytes=16 << 20,
        threads=1,
        model_control=True,
        **settings,
    )


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("loader", ["process", "thread"])
async def test_nothing_of_an_unloaded_model_is_left(
    tmp_path: Path, one_thread: None, family: str, loader: str
) -> None:
    first = Instance(config_of(save_tiny(family, tmp_path), loader=loader))
    async with running_server(first) as server:
        greedy = {"temperature": 0} if family == "llama" else {}
        body = {"inputs": [ONCE], "parameters": greedy}
        before = (await server.post(INFER, body)).json["outputs"]
        worker = (first.engine if family == "llama" else first.embedder).result()
        left = [weakref.ref(worker), weakref.ref(model_of(worker)), weakref.ref(first.load)]
        if family == "llama":
            left.append(weakref.ref(worker.prefix_pool))
        del worker
        assert (await server.post(UNLOAD)).status == 200
        gc.collect()
        assert [each() for each in left] == [None] * len(left)  # although `first` is here still
        assert (await server.post(LOAD)).status == 200
        assert (await server.post(INFER, body)).json["outputs"] == before
        assert server.service.instance.timeline.snapshot()["spans"][0]["start_s"] < 1


@pytest.mark.parametrize("mapped", [True, False])
async def test_the_memory_of_weights_goes_back_to_the_system(
    tmp_path: Path, one_thread: None, mapped: bool
) -> None:
    weights_bytes = synthesize("minilm", tmp_path / "model").size_bytes
    assert weights_bytes > 80 << 20
    config = config_of(tmp_path / "model", mmap=mapped)
    timeline = Timeline()
    launched = launch_helpers(config, timeline)
    assert launched is not None
    first = Instance(config, timeline=timeline, launched=launched)  # held on to, as `teneral serve` does
    async with running_server(first) as server:
        for _ in range(2):
            assert (await server.post(INFER, {"inputs": [ONCE]})).status == 200
            await server.eventually(lambda: str(server.service.state) == "ready")
            instance = server.service.instance
            for group in range(len(instance.load.manifest.groups)):
                instance.load.slab(group).max()  # so that this process has all of its pages
            del instance
            loaded_bytes = resident_bytes()
            assert (await server.post(UNLOAD)).status == 200
            assert loaded_bytes - resident_bytes() > 0.9 * weights_bytes
            assert (await server.post(LOAD)).status == 200


async def test_a_model_that_is_gone_from_its_place_cannot_come_back_until_it_is_there(
    tmp_path: Path, one_thread: None
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_tiny("llama", model)
    async with running_server(Instance(config_of(model))) as server:
        assert (await server.post(INFER, {"inputs": [ONCE]})).status == 200
        await server.post(UNLOAD)
        model.rename(tmp_path / "away")
        answer = await server.post(LOAD)
        assert answer.status == 503
        assert (await server.request("POST", "/v2/repository/index")).json[0]["state"] == "UNAVAILABLE"
        assert not server.task.done()
        (tmp_path / "away").rename(model)
        assert (await server.post(LOAD)).status == 200
        assert (await server.post(INFER, {"inputs": [ONCE]})).status == 200
