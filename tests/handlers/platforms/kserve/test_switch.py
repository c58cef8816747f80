"""A warm server that takes up fine-tunes of its model: real instances, real artifacts."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.http_server import Server, events
from tests.support.inspection import draft_steps_of, fine_tunes_of
from tests.support.switching import BODY, DRAFT, Models, alone, answer, config_of, serving, switch

from teneral.handlers.http.limits import Limits
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack


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
        await server.eventually(lambda: len(fine_tunes_of(server.service.slot)) == 1)
        tuned = server.service.instance
        left = [weakref.ref(tuned.load), weakref.ref(tuned.engine.result())]
        del tuned, figures
        assert (await switch(server, models.base)).status == 200
        assert server.service.instance is server.instance
        await server.eventually(lambda: not fine_tunes_of(server.service.slot))
        gc.collect()
        assert [each() for each in left] == [None] * len(left)
        assert await answer(server) == of_base
        assert not server.task.done()


@pytest.mark.parametrize("loader", ["process", "thread"])
async def test_torch_switches_too_after_either_kind_of_load(models: Models, loader: str) -> None:
    options = {"backend": "torch", "loader": loader}
    async with serving(models.whole("one"), **options) as server:
        expected = await answer(server)
    async with serving(models.base, **options) as server:
        before = await answer(server)
        assert (await switch(server, models.folder / "one")).status == 200
        assert await answer(server) == expected
        assert (await switch(server, models.base)).status == 200
        assert await answer(server) == before


async def test_a_chat_with_the_fine_tune_uses_the_base_s_tokenizer(models: Models) -> None:
    async with serving(models.base) as server:
        await answer(server)
        assert (await switch(server, models.folder / "one")).status == 200
        now, base = server.service.instance, server.instance
        assert now.tokenizer.result() is base.tokenizer.result()
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        of_tuned = await server.post("/v1/chat/completions", chat)
        assert of_tuned.status == 200, of_tuned.body
        assert (await switch(server, models.base)).status == 200
        of_base = await server.post("/v1/chat/completions", chat)
        assert of_base.status == 200, of_base.body


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
        engine = now.engine.result()
        await server.eventually(lambda: draft_steps_of(engine) >= 3)
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
        await server.eventually(lambda: len(fine_tunes_of(server.service.slot)) == 1)


async def test_every_answer_under_switches_is_wholly_one_models(models: Models) -> None:
    chance = random.Random(0)
    addresses = {"base": models.base, "one": models.folder / "one", "two": models.folder / "two"}
    expected = [await alone(models.base), *[await alone(models.whole(name)) for name in ("one", "two")]]
    seen: set[int] = set()
    done = asyncio.Event()

    async def ask(server: Server) -> None:
        while not done.is_set():
            seen.add(expected.index(await answer(server)))

    async with serving(models.base) as server:
        await answer(server)
        clients = [asyncio.create_task(ask(server)) for _ in range(3)]
        for _ in range(12):
            name = chance.choice(list(addresses))
            assert (await switch(server, addresses[name])).status == 200
            assert server.service.instance.config.model == str(addresses[name])
            await asyncio.sleep(chance.uniform(0, 0.1))
        for number, address in enumerate(addresses.values()):  # at least one answer of each
            assert (await switch(server, address)).status == 200
            await server.eventually(lambda number=number: number in seen)
        done.set()
        await asyncio.gather(*clients)
        assert seen == {0, 1, 2}


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
