"""The application as other parts of its process reach it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from tests.support.abandoned_folders import folder_of
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.app import create_app
from teneral.handlers.http.server import serving_inside


async def test_what_comes_from_inside_goes_through_the_same_routes(tiny_parts: TinyParts) -> None:
    with StagedInstance(tiny_parts) as instance:
        instance.let_in()
        async with serving_inside(create_app(instance)) as session:
            body: dict[str, Any] = {"prompt": "ab", "max_tokens": 2}
            answers = await asyncio.gather(*(session.post("/v1/completions", json=body) for _ in range(20)))
            for answer in answers:
                assert answer.status == 200
                assert (await answer.json())["usage"]["completion_tokens"] == 2
            missing = await session.get("/not/there")
            assert missing.status == 404
            assert (await missing.json())["error"]["code"] == "unknown_url"


RUN = """
import asyncio, time
from aiohttp import web
from teneral.handlers.http.server import serving_inside

async def run():
    async with serving_inside(web.Application()) as session:
        print(session.connector.path.rpartition("/")[0], flush=True)
        time.sleep(600)

asyncio.run(run())
"""


async def test_the_socket_of_a_killed_process_is_removed_by_the_next_one() -> None:
    with folder_of(RUN) as left:
        async with serving_inside(web.Application()):
            assert left.exists(), "its process lives"
    async with serving_inside(web.Application()):
        assert not left.exists()
