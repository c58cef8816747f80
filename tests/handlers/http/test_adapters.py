"""Adapters over HTTP: a real instance over a tiny model, and adapters in a folder and in stores."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapters import greedy, merged, save_adapter
from tests.support.http_server import events, running_server
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

PROMPT = [(number * 7) % 90 for number in range(40)]
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
}
NAMES = ("german", "legal-v2", "poems.3")


class Rig:
    """A tiny base, adapters of it in a folder, and what transformers says with each of them merged."""

    def __init__(self, folder: Path) -> None:
        self.base = save_tiny("llama", folder / "base")
        self.model = tiny_model("llama")
        self.adapters = folder / "adapters"
        self.texts: dict[str, list[int]] = {"": greedy(self.model, PROMPT, 12)}
        for seed, name in enumerate(NAMES):
            own = save_adapter(self.adapters / name, self.model, seed=seed, target_modules="all-linear")
            self.texts[name] = greedy(merged(self.model, own), PROMPT, 12)

    def config(self, **settings: Any) -> ServeConfig:
        given = {"adapters": f"{self.adapters}/{{name}}", "kv_bytes": 1 << 22, **settings}
        return ServeConfig(
            model=str(self.base), name="base", **{"backend": "native", "loader": "thread", **given}
        )

    def serve(self, **settings: Any) -> Any:
        return running_server(Instance(self.config(**settings)))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("adapters"))


async def texts_of(server: Any, rig: Rig) -> dict[str, Any]:
    tokenizer = server.instance.tokenizer.result()
    return {name: whole(tokenizer.decode(each)) for name, each in rig.texts.items()}


def whole(text: str) -> str:
    """Without what a cut character leaves at the end."""
    return text.rstrip("\ufffd")


def text(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return whole(answer.json["choices"][0]["text"])


async def test_answers_are_those_of_merged_models(rig: Rig) -> None:
    async with rig.serve() as server:
        expected = await texts_of(server, rig)
        assert len(set(expected.values())) == 1 + len(NAMES)
        plain = await server.post("/v1/completions", BODY)
        assert text(plain) == expected[""]
        assert plain.json["model"] == "base"
        for name in NAMES:
            answer = await server.post("/v1/completions", {**BODY, "model": f"base:{name}"})
            assert text(answer) == expected[name]
            assert answer.json["model"] == f"base:{name}"
        answer = await server.post("/v1/completions", {**BODY, "lora": "german"})
        assert text(answer) == expected["german"]


async def test_all_of_them_at_once_and_streams(rig: Rig) -> None:
    async with rig.serve() as server:
        expected = await texts_of(server, rig)
        names = [*NAMES, ""] * 3
        bodies = [{**BODY, "model": f"base:{name}" if name else "base"} for name in names]
        answers = await asyncio.gather(*(server.post("/v1/completions", body) for body in bodies))
        assert [text(answer) for answer in answers] == [expected[name] for name in names]
        streamed = await server.post("/v1/completions", {**bodies[1], "stream": True})
        chunks = [json.loads(each) for each in events(streamed.body)[:-1]]
        assert whole("".join(chunk["choices"][0]["text"] for chunk in chunks)) == expected[names[1]]
        server.instance.adapters.check_integrity()


async def test_chats_responses_and_messages_take_adapters(rig: Rig) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 8, "temperature": 0},
        "/v1/responses": {"input": "hello there", "max_output_tokens": 8, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 8, "temperature": 0},
    }
    async with rig.serve() as server:
        for path, body in bodies.items():
            answers = [
                await server.post(path, {**body, "model": name})
                for name in ("base", "base:german", "base:german")
            ]
            assert [answer.status for answer in answers] == [200] * 3, answers[1].body
            plain, first, second = (_content_of(answer.json) for answer in answers)
            assert plain != first == second, path
            assert answers[1].json["model"] == "base:german"


def _content_of(answer: Any) -> Any:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    return answer.get("content") or answer["output"][0]["content"][0]["text"]


async def load(server: Any, *names: str) -> None:
    """Returns when they are loaded whole: before, blocks that an adapter filled are not kept for others."""
    for name in names:
        body = {**BODY, "prompt": [1, 2, 3], "model": f"base:{name}"}
        assert (await server.post("/v1/completions", body)).status == 200
    await server.eventually(lambda: server.instance.adapters.statistics().loaded == len(names))


async def test_prefixes_are_never_shared_between_adapters(rig: Rig) -> None:
    async with rig.serve() as server:
        await load(server, "german", "legal-v2")
        found = {}
        for name in ("base", "base:german", "base:legal-v2", "base:german", "base"):
            answer = await server.post("/v1/completions", {**BODY, "model": name})
            details = answer.json["usage"]["prompt_tokens_details"]
            found.setdefault(name, []).append(details["cached_tokens"])
        assert found == {"base": [0, 39], "base:german": [0, 39], "base:legal-v2": [0]}


async def test_salts_keep_tenants_with_one_adapter_apart(rig: Rig) -> None:
    async with rig.serve() as server:
        await load(server, "german")
        found = []
        for salt in ("a", "b", "a"):
            body = {**BODY, "model": "base:german", "teneral": {"cache_salt": salt, "tenant": salt}}
            answer = await server.post("/v1/completions", body)
            found.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 0, 39]


@pytest.mark.parametrize("name", ["missing", "../base", "a/b", "", ".hidden", "x" * 200, "ä"])
async def test_unknown_names_are_404(rig: Rig, name: str) -> None:
    async with rig.serve() as server:
        answer = await server.post("/v1/completions", {**BODY, "model": f"base:{name}"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_without_adapters_a_name_with_a_colon_is_404(rig: Rig) -> None:
    async with rig.serve(adapters=None) as server:
        answer = await server.post("/v1/completions", {**BODY, "model": "base:german"})
        assert (answer.status, answer.error["param"]) == (404, "model")
        assert (
            await server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})
        ).status == 403


async def test_a_broken_adapter_is_400_and_the_server_goes_on(rig: Rig, tmp_path: Path) -> None:
    save_adapter(tmp_path / "dora", rig.model, use_dora=True)
    cut = save_adapter(tmp_path / "cut", rig.model) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    save_adapter(tmp_path / "good", rig.model)
    async with rig.serve(adapters=f"{tmp_path}/{{name}}") as server:
        for name, reason in (("dora", "use_dora"), ("cut", "bytes")):
            answer = await server.post("/v1/completions", {**BODY, "model": f"base:{name}"})
            assert (answer.status, answer.error["code"]) == (400, "adapter_invalid")
            assert reason in answer.error["message"]
        assert (await server.post("/v1/completions", {**BODY, "model": "base:good"})).status == 200
        statistics = server.instance.adapters.statistics()
        assert (statistics.loaded, statistics.failures_total, statistics.pinned) == (1, 2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_an_adapter_that_would_make_every_answer_nan_is_refused_at_its_load(
    rig: Rig, tmp_path: Path, dtype: torch.dtype, number: float
) -> None:
    path = save_adapter(tmp_path / "bad", rig.model, dtype=dtype) / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[-1]  # of the last layer
    tensors[name][-1, -1] = number
    save_file(tensors, path)
    async with rig.serve(adapters=f"{tmp_path}/{{name}}", model_control=True) as server:
        answer = await server.post("/v1/completions", {**BODY, "model": "base:bad"})
        assert (answer.status, answer.error["code"]) == (400, "adapter_invalid")
        assert f"{name} has numbers that are NaN or infinite" in answer.error["message"]
        loaded = await server.post(
            "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "bad")}
        )
        assert (loaded.status, loaded.error["code"]) == (400, "adapter_invalid")
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_an_adapter_larger_than_the_budget_is_refused(rig: Rig) -> None:
    async with rig.serve(adapters_bytes=1000) as server:
        answer = await server.post("/v1/completions", {**BODY, "model": "base:german"})
        assert answer.status == 400
        assert "--adapters-bytes" in answer.error["message"]


async def test_adapters_are_loaded_and_unloaded_as_vllm_does(rig: Rig) -> None:
    async with rig.serve(model_control=True, adapters=None) as server:
        expected = await texts_of(server, rig)
        path = str(rig.adapters / "german")
        loaded = await server.post("/v1/load_lora_adapter", {"lora_name": "de", "lora_path": path})
        assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'de' added successfully.")
        again = await server.post("/v1/load_lora_adapter", {"lora_name": "de", "lora_path": path})
        assert again.status == 400
        for name in ("de", "base:de"):
            answer = await server.post("/v1/completions", {**BODY, "model": name})
            assert (text(answer), answer.json["model"]) == (expected["german"], name)
        models = (await server.get("/v1/models")).json["data"]
        assert [(each["id"], each.get("parent")) for each in models] == [("base", None), ("de", "base")]
        assert (await server.get("/v1/models/de")).json["parent"] == "base"
        missing = {"lora_name": "fr", "lora_path": f"{path}-x"}
        assert (await server.post("/v1/load_lora_adapter", missing)).status == 404
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "de"})).status == 200
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "de"})).status == 404
        assert (await server.post("/v1/completions", {**BODY, "model": "de"})).status == 404
        inplace = {"lora_name": "de", "lora_path": str(rig.adapters / "legal-v2"), "load_inplace": True}
        for _ in range(2):
            assert (await server.post("/v1/load_lora_adapter", inplace)).status == 200
        answer = await server.post("/v1/completions", {**BODY, "model": "de"})
        assert text(answer) == expected["legal-v2"]


async def test_models_lists_adapters_that_are_there(rig: Rig) -> None:
    async with rig.serve() as server:
        await server.post("/v1/completions", {**BODY, "model": "base:german"})
        models = (await server.get("/v1/models")).json["data"]
        assert [each["id"] for each in models] == ["base", "base:german"]


async def test_metrics_count_adapters(rig: Rig) -> None:
    async with rig.serve() as server:
        for name in ("german", "legal-v2", "german", "missing"):
            await server.post("/v1/completions", {**BODY, "model": f"base:{name}"})
        while server.instance.adapters.statistics().loading:  # the last bytes' digest may be under way
            await asyncio.sleep(0.005)
        lines = (await server.get("/metrics")).body.decode().splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("teneral_adapters_"))
        sizes = [each.size_bytes for each, _ in server.instance.adapters.listed()]
        expected = {
            "loaded": 2,
            "loaded_bytes": sum(sizes),
            "max_bytes": 1 << 30,
            "pinned": 0,
            "loading": 0,
            "waiting_for_room": 0,
            "hits_total": 1,
            "misses_total": 3,
            "loads_total": 2,
            "failures_total": 1,
            "evictions_total": 0,
        }
        assert float(found.pop("teneral_adapters_load_seconds_total")) > 0
        assert {name: float(value) for name, value in found.items()} == {
            f"teneral_adapters_{name}": value for name, value in expected.items()
        }
    async with rig.serve(adapters=None) as server:
        assert "teneral_adapters" not in (await server.get("/metrics")).body.decode()


async def test_a_backend_without_adapters_refuses_by_name(rig: Rig) -> None:
    async with rig.serve(backend="torch") as server:
        answer = await server.post("/v1/completions", {**BODY, "model": "base:german"})
        assert answer.status == 503
        assert "torch" in server.instance.failure.message
