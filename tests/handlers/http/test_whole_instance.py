"""A real instance behind the server, from a model directory to an answer, with nothing staged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.http_server import running_server
from tests.support.tiny_models import save_tiny
from tests.support.vision_models import data_url, file_of, oracle_inputs, picture, save_vision

from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance


@pytest.mark.parametrize(
    ("family", "path", "body"),
    [
        ("llama", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("bert", "/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_the_first_request_may_come_before_the_model(
    tmp_path: Path, one_thread: None, family: str, path: str, body: dict[str, Any]
) -> None:
    config = ServeConfig(
        model=str(save_tiny(family, tmp_path)), name="tiny/model", kv_bytes=4 << 20, threads=1
    )
    async with running_server(Instance(config)) as server:
        answer = await server.post(path, body)
        assert answer.status == 200, answer.body
        await server.eventually(lambda: server.instance.state.can_answer)
        assert (await server.get("/readyz")).status == 200
        await server.eventually(lambda: "load" in server.instance.statistics())  # in the load's last report
        assert b"teneral_load_" in (await server.get("/metrics")).body
        lanes = {span["lane"] for span in (await server.get("/timeline")).json["spans"]}
        assert {"fetch", "model"} <= lanes


@pytest.mark.parametrize(
    ("family", "tiers"),
    [
        ("idefics3", None),
        ("llava", TierOptions(draft_bits=3)),
        ("llava_next", None),
        ("llava_onevision", TierOptions(draft_bits=3)),
        ("gemma3", TierOptions(draft_bits=3)),
        ("gemma4", TierOptions(draft_bits=3)),
        ("qwen2_5_vl", TierOptions(draft_bits=3)),
        ("qwen3_5", None),
    ],
)
async def test_a_packed_model_answers_about_an_image_that_came_before_it(
    tmp_path: Path, one_thread: None, family: str, tiers: TierOptions | None
) -> None:
    model = save_vision(tmp_path / "plain", family)
    pack(open_source(str(tmp_path / "plain")), open_store(str(tmp_path / "packed")), tiers=tiers)
    config = ServeConfig(model=str(tmp_path / "packed"), name="tiny/eyes", kv_bytes=4 << 20, threads=1)
    part = {"type": "image_url", "image_url": {"url": data_url(file_of(picture(20, 60)))}}
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    async with running_server(Instance(config)) as server:
        answer = (await server.post("/v1/chat/completions", body)).json
        processor = server.instance.tokenizer.result().images
        tiles = processor.tiles(picture(20, 60)).tiles
        with torch.no_grad():
            inputs = oracle_inputs(model, answer["prompt_token_ids"], tiles, sizes=[(60, 20)])
            logits = model(**inputs).logits
        assert answer["choices"][0]["token_ids"] == [int(logits[0, -1].argmax())]
