"""Switches that fail or are refused: the model from before serves on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.switching import LOAD, UNLOAD, Models, alone, answer, fine_tune, serving, switch

from teneral.loader.load import room
from teneral.loader.memory.limits import Available
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack


@pytest.mark.parametrize("from_tuned", [False, True])
async def test_a_failed_difference_leaves_the_model_from_before_serving(
    models: Models, tmp_path: Path, from_tuned: bool
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(models.folder / "two", damaged)
    for blob in damaged.rglob("*.bin"):
        content = bytearray(blob.read_bytes())
        content[len(content) // 2] ^= 1
        blob.write_bytes(content)
    async with serving(models.base) as server:
        before = await answer(server)
        if from_tuned:
            await switch(server, models.folder / "one")
            before = await answer(server)
        serves = server.service.instance
        refused = await switch(server, damaged)
        assert refused.status == 503
        assert "wrong digest" in refused.json["error"]
        assert server.service.instance is serves
        assert await answer(server) == before
        assert (await server.get("/readyz")).status == 200
        assert (await switch(server, models.folder / "two")).status == 200
        assert await answer(server) == await alone(models.whole("two"))
        assert not server.task.done()


async def test_what_cannot_be_taken_up_changes_nothing(models: Models, tmp_path: Path) -> None:
    other = Models(tmp_path / "other")
    stranger = other.tuned("stranger", seed=9)
    pack(FileStore(fine_tune(other.plain, tmp_path / "moved", seed=8, scale=0.3)), FileStore(tmp_path / "b"))
    pack(FileStore(other.plain), FileStore(tmp_path / "far"), base=Base(FileStore(tmp_path / "b")))
    async with serving(models.base) as server:
        before = await answer(server)
        refusals = {
            tmp_path / "far": "is not the base of",
            models.whole("one"): "is whole",
            models.plain: "is whole",
            tmp_path / "missing": "does not exist",
        }
        for address, message in refusals.items():
            refused = await switch(server, address)
            assert refused.status == 400
            assert message in refused.json["error"]
            assert server.service.instance is server.instance
        # The same weights packed twice are the same base.
        assert (await switch(server, stranger)).status == 200
        await switch(server, models.base)
        assert await answer(server) == before


@pytest.mark.parametrize("model", ["", 1, None, "x" * 3000, "a\0b", ["x"]])
async def test_what_is_no_address_is_refused(models: Models, model: Any) -> None:
    async with serving(models.base) as server:
        await answer(server)
        refused = await server.post(LOAD, {"parameters": {"model": model}})
        assert refused.status == (200 if model is None else 400)
        assert (await server.post(UNLOAD, {"parameters": {"model": "x"}})).status == 400


async def test_plain_weights_are_no_base(models: Models) -> None:
    async with serving(models.plain) as server:
        before = await answer(server)
        refused = await switch(server, models.folder / "one")
        assert refused.status == 400
        assert "plain safetensors" in refused.json["error"]
        assert await answer(server) == before


async def test_without_model_control_there_is_no_switch(models: Models) -> None:
    async with serving(models.base, model_control=False) as server:
        await answer(server)
        assert (await switch(server, models.folder / "one")).status == 403


async def test_an_unloaded_model_is_no_base_and_unloading_takes_the_base_too(models: Models) -> None:
    async with serving(models.base) as server:
        before = await answer(server)
        await switch(server, models.folder / "one")
        tuned, base = server.service.instance, server.instance
        assert (await server.post(UNLOAD)).status == 200
        assert tuned.ended.done()
        assert base.ended.done()
        assert (await switch(server, models.folder / "one")).status == 503
        assert (await server.post(LOAD)).status == 200
        assert await answer(server) == before
        assert (await switch(server, models.folder / "one")).status == 200
        assert await answer(server) == await alone(models.whole("one"))


async def test_a_fine_tune_for_which_there_is_no_memory_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(models.base) as server:
        before = await answer(server)
        with monkeypatch.context() as patch:
            patch.setattr(room, "available", lambda: Available(100_000, "as the test says"))
            refused = await switch(server, models.folder / "one")
            assert refused.status == 400
            assert "as the test says" in refused.json["error"]
        assert server.service.instance is server.instance
        assert await answer(server) == before
        assert (await switch(server, models.folder / "one")).status == 200


async def test_a_mixture_that_is_not_all_in_memory_is_no_base(tmp_path: Path, one_thread: None) -> None:
    models = Models(tmp_path, "mixtral")
    models.tuned("one", seed=1)
    async with serving(models.base, weights_bytes=400_000, backend="native") as server:
        before = await answer(server)
        load = server.instance.load
        assert load is not None
        assert load.paged_groups
        refused = await switch(server, models.folder / "one")
        assert refused.status == 400
        assert "weights_bytes" in refused.json["error"]
        assert await answer(server) == before
