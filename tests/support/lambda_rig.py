"""Lambda's loop in the test's own event loop, around an instance that the test steers; and `teneral serve` as Lambda
starts it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fake_runtime_api import FakeRuntimeApi, Outcome
from tests.support.instances import StagedInstance
from tests.support.load import patience_s

from teneral.handlers.app import create_app
from teneral.handlers.function.handler import Handler
from teneral.handlers.platforms.aws_lambda.answers import LoopAnswers
from teneral.handlers.platforms.aws_lambda.loop import InvocationLoop

WAIT_S = patience_s(60)


@dataclass
class Rig:
    api: FakeRuntimeApi
    instance: StagedInstance
    loop: InvocationLoop
    task: asyncio.Task[None]

    async def invoke(self, event: Any = None, **options: Any) -> Outcome:
        return await self.outcome(self.api.submit(event, **options))

    async def outcome(self, submitted: Outcome) -> Outcome:
        return await asyncio.to_thread(submitted.wait)

    async def end(self) -> None:
        """Tell it to stop, and wait until it has. Raises what it ended with."""
        self.loop.request_stop()
        await self.task


@asynccontextmanager
async def running_loop(
    api: FakeRuntimeApi,
    instance: StagedInstance,
    function: Callable[..., Any],
    *,
    is_streaming: bool = False,
    num_workers: int = 1,
    drain_timeout_s: float = 1.0,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Rig]:
    """The end of the loop is not waited for where it has failed: `Rig.end` tells."""
    handler = Handler(function)
    with instance:
        answers = LoopAnswers(
            instance,
            handler,
            lambda: create_app(instance, handler=handler),
            environment=environment or {},
            is_streaming=is_streaming,
        )
        loop = InvocationLoop(
            api.address,
            instance,
            answers.answer,
            num_workers=num_workers,
            drain_timeout_s=drain_timeout_s,
        )
        instance.ended.add_done_callback(lambda _: loop.request_stop())
        task = asyncio.create_task(loop.run())
        try:
            yield Rig(api, instance, loop, task)
        finally:
            loop.request_stop()
            await asyncio.wait({task})
            task.exception()
            await answers.close()
            handler.close()


@contextmanager
def runtime_process(
    api: FakeRuntimeApi | None,
    *arguments: str,
    folder: Path | None = None,
    is_heard: bool = True,
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """A process in the surroundings that Lambda gives one: killed in the end where it still runs.

    `is_heard`: the test reads its output. A pipe without a reader is full after 64 KiB, and its writer blocks.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TENERAL_"))}
    if api is not None:
        kept["AWS_LAMBDA_RUNTIME_API"] = api.address
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE if is_heard else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=kept | environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
