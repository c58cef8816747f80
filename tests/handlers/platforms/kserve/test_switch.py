"""A warm server that takes up fine-tunes of its model: real instances, real artifacts."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.http_server import Server, events, running_server
from tests.support.paced import PacedSource, every_read
from tests.support.tiny_models import save_tiny

from teneral.handlers.http.limits import Limits
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.base import Base
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance import Instance

LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 1}
DRAFT = {"teneral": {"first_token": "draft"}}


def fine_tune(model: Path, directory: Path, *, seed: int, scale: float = 0.02) -> Path:
    """A model whose layers differ a little from another's, and whose embeddings are the same."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if "layers" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = (tensor.float() * (1 + scale * noise)).to(tensor.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Models:
    """A packed base, and fine-tunes of it: as differences, and whole."""

    def __init__(self, folder: Path, family: str = "llama") -> None:
        self.folder = folder
        self.plain = save_tiny(family, folder / "plain", dtype=torch.bfloat16)
        self.base = folder / "base"
        pack(FileStore(self.plain), FileStore(self.base))

    def tuned(self, name: str, *, seed: int, change: Callable[[Path], object] = lambda folder: None) -> Path:
        model = fine_tune(self.plain, self.folder / f"{name}-plain", seed=seed)
        change(model)
        pack(FileStore(model), FileStore(self.folder / name), base=Base(FileStore(self.base)))
        pack(FileStore(model), FileStore(self.whole(name)))
        return self.folder / name

    def whole(self, name: str) -> Path:
        return self.folder / f"{name}-whole"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Models:
    models = Models(tmp_path_factory.mktemp("switch"))
    models.tuned("one", seed=1)
    models.tuned("two", seed=2)
    return models


def config_of(address: Path, **settings: Any) -> ServeConfig:
    defaults = {"name": "m", "kv_bytes": 8 << 20, "threads": 1, "model_control": True}
    return ServeConfig(model=str(address), **{**defaults, **settings})


def serving(address: Path, *, limits: Limits | None = None, **settings: Any) -> Any:
    config = config_of(address, **settings)
    return running_server(Instance(config), limits=limits or Limits.from_config(config))


async def switch(server: Server, address: Path) -> Any:
    return await server.post(LOAD, {"parameters": {"model": str(address)}})


async def answer(server: Server, **changes: Any) -> dict[str, Any]:
    """The text and its log-probabilities, which are equal only where all weights are."""
    found = await server.post("/v1/completions", {**BODY, **changes})
    assert found.status == 200, found.body
    return dict(found.json["choices"][0])


async def alone(address: Path, **changes: Any) -> dict[str, Any]:
    async with serving(address) as server:
        return await answer(server, **changes)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`held(name)` holds all reads of weights of the artifact of that name, from its next opening on."""
    from teneral.runtime import instance

    open_model, rules = instance.open_model, {}

    def opened(address: str, *args: Any, **kwargs: Any) -> Any:
        source = open_model(address, *args, **kwargs)
        hold = rules.get(Path(address).name)
        if hold is None:
            return source
        paced = PacedSource(source)
        hold.append(paced.hold(every_read))
        return paced

    monkeypatch.setattr(instance, "open_model", opened)

    def hold(name: str) -> list[Any]:
        return rules.setdefault(name, [])

    yield hold
    for holds in rules.values():
        for each in holds:
            each.release()


async def test_a_warm_server_becomes_the_fine_tune_and_its_base_again(models: Models) -> None:
    expected = {name: await alone(models.whole(name)) for name in ("one", "two")}
    async with serving(models.base, verify_exact=True) as server:
        of_base = await answer(server)
        assert len({json.dumps(each) for each in (of_base, *expected.values())}) == 3
        for name in ("one", "two", "one"):
            assert (await switch(server, models.folder / name)).status == 200
            assert await answer(server) == expected[name]
            figures = server.service.instance.statistics()
            assert figures["load"].unverified_bytes == 0
            assert figures["load"].stored_bytes < 0.6 * figures["load"].weight_bytes
        await server.eventually(lambda: len(server.service.slot._tuned) == 1)
        tuned = server.service.instance
        left = [weakref.ref(tuned._load), weakref.ref(tuned.engine.result())]
        del tuned, figures
        assert (await switch(server, models.base)).status == 200
        assert server.service.instance is server.instance
        await server.eventually(lambda: not server.service.slot._tuned)
        gc.collect()
        assert [each() for each in left] == [None] * len(left)
        assert await answer(server) == of_base
        assert not server.task.done()


async def test_a_chat_with_the_fine_tune_uses_the_base_s_tokenizer(models: Models) -> None:
    async with serving(models.base) as server:
        await answer(server)
        await switch(server, models.folder / "one")
        now, base = server.service.instance, server.instance
        assert now.tokenizer.result() is base.tokenizer.result()
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert (await server.post("/v1/chat/completions", chat)).status == 200
        await switch(server, models.base)
        assert (await server.post("/v1/chat/completions", chat)).status == 200


async def test_another_tokenizer_is_the_fine_tunes_own(models: Models, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ 'x' }}"}))

    own = Models(tmp_path / "models")
    own.tuned("other", seed=3, change=change)
    async with serving(own.base) as server:
        await answer(server)
        assert (await switch(server, own.folder / "other")).status == 200
        now, base = server.service.instance, server.instance
        assert now.tokenizer.result() is not base.tokenizer.result()
        assert now.text_settings.result() != base.text_settings.result()
        assert await answer(server) == await alone(own.whole("other"))


async def test_a_config_that_differs_in_nothing_that_matters_shares_the_tokenizer(
    models: Models, tmp_path: Path
) -> None:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "_name_or_path": "elsewhere"}))

    own = Models(tmp_path / "models")
    own.tuned("other", seed=3, change=change)
    async with serving(own.base) as server:
        await answer(server)
        assert (await switch(server, own.folder / "other")).status == 200
        assert server.service.instance.tokenizer.result() is server.instance.tokenizer.result()


@pytest.mark.parametrize("threads", [1, 2])
async def test_running_requests_of_the_base_end_on_the_base(models: Models, held: Any, threads: int) -> None:
    long = {"max_tokens": 300, "ignore_eos": True, "logprobs": None}
    expected = await alone(models.base, **long)
    holds = held("one")
    async with serving(models.base, threads=threads) as server:
        await answer(server)
        async with server.stream("/v1/completions", {**BODY, **long}) as response:
            await response.content.readline()
            changing = asyncio.create_task(switch(server, models.folder / "one"))
            await server.eventually(lambda: server.service.instance is not server.instance)
            text = "".join(
                json.loads(each)["choices"][0]["text"]
                for each in events(b"data: {}\n\n" + await response.read())[1:-1]
            )
            assert expected["text"].endswith(text)
        for hold in holds:
            hold.release()
        assert (await changing).status == 200
        assert await answer(server) == await alone(models.whole("one"))


async def test_the_base_drafts_for_its_fine_tune_at_once(models: Models, held: Any) -> None:
    of_base = await alone(models.base, logprobs=None)
    holds = held("one")
    async with serving(models.base) as server:
        await answer(server)
        changing = asyncio.create_task(switch(server, models.folder / "one"))
        await server.eventually(lambda: server.service.instance is not server.instance)
        (entry,) = (await server.request("POST", "/v2/repository/index")).json
        assert entry["reason"] == f"switching to {models.folder / 'one'}"
        # Not a byte of the differences is there: the drafted tokens are the base's, and marked.
        body = {**BODY, **DRAFT, "logprobs": None}
        async with server.stream("/v1/completions", body) as response:
            line = b""
            while not line.startswith(b"data: "):
                line = await response.content.readline()
            chunk = json.loads(line.removeprefix(b"data: "))
            assert chunk["teneral"]["drafted_tokens"] >= 1
            assert of_base["text"].startswith(chunk["choices"][0]["text"])
            assert not changing.done()
            for hold in holds:
                hold.release()
            await response.read()
        assert (await changing).status == 200
        assert await answer(server) == await alone(models.whole("one"))


async def test_an_exact_request_gets_the_fine_tunes_tokens_of_which_the_base_proposed_some(
    models: Models, held: Any
) -> None:
    holds = held("one")
    expected = await alone(models.whole("one"), logprobs=None)
    async with serving(models.base) as server:
        await answer(server)
        changing = asyncio.create_task(switch(server, models.folder / "one"))
        await server.eventually(lambda: server.service.instance is not server.instance)
        asked = asyncio.create_task(server.post("/v1/completions", {**BODY, "logprobs": None}))
        now = server.service.instance
        await server.eventually(lambda: now.engine.done() and now.engine.result().statistics().running == 1)
        early = now.engine.result()._early
        await server.eventually(lambda: early._num_draft_steps >= 3)
        for hold in holds:
            hold.release()
        found = (await asked).json
        assert found["choices"][0]["text"] == expected["text"]
        details = found["usage"]["completion_tokens_details"]
        assert details["drafted_tokens"] == 0
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] >= 2
        assert (await changing).status == 200
        # Nothing that the base computed is found by the fine-tune's next requests.
        assert await answer(server) == await alone(models.whole("one"))
        now.engine.result().check_integrity()


async def test_nothing_that_the_base_has_computed_is_found_by_the_fine_tune(models: Models) -> None:
    body = {**BODY, "prompt": "Once upon a time " * 8}

    async def num_cached(server: Server) -> int:
        usage = (await server.post("/v1/completions", body)).json["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    async with serving(models.base) as server:
        await num_cached(server)
        assert await num_cached(server) > 0
        await switch(server, models.folder / "one")
        assert await num_cached(server) == 0
        assert await num_cached(server) > 0
        await switch(server, models.base)
        assert await num_cached(server) > 0
        text = server.metrics_text()
        assert 'teneral_starts_total{kind="switch",outcome="ok"} 1' in text


async def test_a_fine_tune_of_another_shape_has_no_draft(tmp_path: Path, one_thread: None, held: Any) -> None:
    def grow(folder: Path) -> None:
        """More tokens than the base has."""
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 328}))
        weights = load_file(folder / "model.safetensors")
        for name, tensor in weights.items():
            if tensor.shape[0] == 320:
                weights[name] = torch.cat([tensor, tensor[:8]])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    models = Models(tmp_path)
    models.tuned("grown", seed=4, change=grow)
    holds = held("grown")
    async with serving(models.base) as server:
        await answer(server)
        changing = asyncio.create_task(switch(server, tmp_path / "grown"))
        await server.eventually(lambda: server.service.instance is not server.instance)
        asked = asyncio.create_task(server.post("/v1/completions", {**BODY, **DRAFT}))
        await asyncio.sleep(0.2)
        assert not asked.done()
        for hold in holds:
            hold.release()
        found = (await asked).json
        assert found["usage"]["completion_tokens_details"]["drafted_tokens"] == 0
        assert (await changing).status == 200
        assert found["choices"][0] == await alone(models.whole("grown"))


async def test_a_switch_waits_until_all_of_the_base_is_exact(models: Models, held: Any) -> None:
    holds = held("base")
    async with serving(models.base) as server:
        await server.eventually(lambda: bool(holds) and holds[0].num_reached > 0)
        changing = asyncio.create_task(switch(server, models.folder / "one"))
        await asyncio.sleep(0.2)
        assert not changing.done()
        assert server.service.instance is server.instance
        holds[0].release()
        assert (await changing).status == 200
        assert await answer(server) == await alone(models.whole("one"))


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


async def test_a_fine_tune_from_before_ends_with_its_last_request(models: Models) -> None:
    limits = Limits.from_config(config_of(models.base))
    async with serving(models.base, limits=limits) as server:
        await answer(server)
        await switch(server, models.folder / "one")
        one = server.service.instance
        expected = await answer(server, max_tokens=300, ignore_eos=True)
        asked = asyncio.create_task(answer(server, max_tokens=300, ignore_eos=True))
        await server.eventually(lambda: one.engine.result().statistics().running == 1)
        assert (await switch(server, models.folder / "two")).status == 200
        assert await asked == expected
        await server.eventually(one.ended.done)
        assert not server.instance.ended.done()
        assert not server.task.done()


async def test_switches_at_the_same_time_come_one_after_the_other(models: Models) -> None:
    names = ["one", "two", "one", "two"]
    async with serving(models.base) as server:
        await answer(server)
        answers = await asyncio.gather(*(switch(server, models.folder / name) for name in names))
        assert [each.status for each in answers] == [200] * len(names)
        assert await answer(server) == await alone(models.whole("two"))
        await server.eventually(lambda: len(server.service.slot._tuned) == 1)


async def test_a_server_may_end_during_a_switch(models: Models, held: Any) -> None:
    held("one")
    async with serving(models.base) as server:
        await answer(server)
        changing = asyncio.create_task(switch(server, models.folder / "one"))
        await server.eventually(lambda: server.service.instance is not server.instance)
        tuned = server.service.instance
    result = (await asyncio.gather(changing, return_exceptions=True))[0]
    assert isinstance(result, Exception) or result.status == 503
    assert tuned.ended.done()


async def test_a_mixture_of_experts_switches_as_well(tmp_path: Path, one_thread: None, held: Any) -> None:
    models = Models(tmp_path, "mixtral")
    models.tuned("one", seed=1)
    holds = held("one")
    of_base = await alone(models.base, logprobs=None)
    async with serving(models.base) as server:
        await answer(server)
        changing = asyncio.create_task(switch(server, models.folder / "one"))
        await server.eventually(lambda: server.service.instance is not server.instance)
        drafted = await server.post("/v1/completions", {**BODY, **DRAFT, "max_tokens": 2, "logprobs": None})
        assert drafted.json["usage"]["completion_tokens_details"]["drafted_tokens"] == 2
        assert of_base["text"].startswith(drafted.json["choices"][0]["text"])
        for hold in holds:
            hold.release()
        assert (await changing).status == 200
        assert await answer(server) == await alone(models.whole("one"))


async def test_a_mixture_that_is_not_all_in_memory_is_no_base(tmp_path: Path, one_thread: None) -> None:
    models = Models(tmp_path, "mixtral")
    models.tuned("one", seed=1)
    async with serving(models.base, weights_bytes=400_000, backend="native") as server:
        before = await answer(server)
        load = server.instance._load
        assert load is not None
        assert load.paged_groups
        refused = await switch(server, models.folder / "one")
        assert refused.status == 400
        assert "weights_bytes" in refused.json["error"]
        assert await answer(server) == before


async def test_an_encoder_switches_as_well(tmp_path: Path, one_thread: None) -> None:
    models = Models(tmp_path, "bert")
    model = tmp_path / "tuned-plain"
    shutil.copytree(models.plain, model)
    weights = load_file(model / "model.safetensors")
    weights = {
        name: (each.float() * 1.01).to(each.dtype) if "layer" in name else each
        for name, each in weights.items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    pack(FileStore(model), FileStore(tmp_path / "tuned"), base=Base(FileStore(models.base)))
    body = {"model": "m", "input": "Once upon"}
    async with serving(model) as server:
        expected = (await server.post("/v1/embeddings", body)).json["data"]
    async with serving(models.base) as server:
        before = (await server.post("/v1/embeddings", body)).json["data"]
        assert (await switch(server, tmp_path / "tuned")).status == 200
        assert (await server.post("/v1/embeddings", body)).json["data"] == expected != before
