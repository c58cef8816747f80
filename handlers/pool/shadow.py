"""Shadow traffic: copies of a share of requests to another version, whose answers are compared and dropped.

A copy is made after the first byte of the real answer, only where the version has a free place, and never of a request
that may act.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

if TYPE_CHECKING:
    from .deployment import Deployment, Lease
    from .supervisor import Supervisor

MAX_IN_WORK = 2
MAX_BODY_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 20
TIMEOUT_S = 300.0
COPIED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})
logger = logging.getLogger("teneral.pool")


class Seen(NamedTuple):
    """The real answer. `whole` is None for a stream. `seconds` are from the request to its last byte, or a stream's
    first.
    """

    status: int
    whole: bytes | None
    seconds: float


class Shadows:
    """Copies in work. One per pool; used on the event loop."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers: dict[str, itertools.count[int]] = {}

    def copy(
        self, path: str, body: bytes, deployment: Deployment, headers: Mapping[str, str], seen: Seen
    ) -> None:
        """Send a copy of a request that was answered as `seen`, if its model has a shadow and it is its turn."""
        shadow = deployment.model.shadow
        state = self._supervisor.models.get(deployment.model.name)
        if shadow is None or state is None or path not in COPIED_PATHS or len(body) > MAX_BODY_BYTES:
            return
        number = next(self._numbers.setdefault(deployment.model.name, itertools.count()))
        if (number + 1) * shadow.percent // 100 == number * shadow.percent // 100:
            return
        target = next((d for d in state.deployments() if d.release.version == shadow.version), None)
        if target is None or target is deployment:
            return
        task = asyncio.create_task(self._send(path, body, target, dict(headers), seen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(
        self, path: str, body: bytes, target: Deployment, headers: dict[str, str], seen: Seen
    ) -> None:
        metrics = self._supervisor.metrics
        lease = None
        if len(self._tasks) <= MAX_IN_WORK:
            lease = await self._supervisor.acquire(target, may_wait=False)
        if lease is None:
            metrics.shadowed("dropped")
            self._supervisor.wake_for_shadow(target)
            return
        outcome = "error"
        try:
            outcome = await self._compare(lease, path, body, headers, seen)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            logger.info("a shadow of %s failed: %s", target.name, type(error).__name__)
        finally:
            metrics.shadowed(outcome)
            self._supervisor.release(lease, is_error=outcome == "error")

    async def _compare(
        self, lease: Lease, path: str, body: bytes, headers: dict[str, str], seen: Seen
    ) -> str:
        began_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        url = f"{lease.server.process.url}{path}"
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            whole = bytearray()
            async for piece in answer.content.iter_any():
                whole += piece[: MAX_ANSWER_BYTES - len(whole)]
            if answer.status >= 500:
                return "error"
            if answer.status != seen.status:
                return "different"
            if seen.whole is None or answer.content_type != "application/json":
                return "same"  # a stream: only how it began is compared
            real, copied = _parsed(seen.whole), _parsed(bytes(whole))
            if real.usage.completion_tokens and copied.usage.completion_tokens:
                self._supervisor.metrics.shadow_speed("answer", real.usage.completion_tokens, seen.seconds)
                self._supervisor.metrics.shadow_speed(
                    "copy", copied.usage.completion_tokens, time.monotonic() - began_s
                )
            return "same" if real.choices == copied.choices else "different"


def _parsed(answer: bytes) -> _Answer:
    """Why each of an answer's choices ended, and its tokens; neither of what is no completion."""
    try:
        return msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, RecursionError):
        return _Answer()


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage = msgspec.field(default_factory=_Usage)
