"""A real instance behind the server, from a model directory to an answer, with nothing staged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.tiny_models import save_tiny

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
