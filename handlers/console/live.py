"""The console's own routes: the timeline as server-sent events, and the artifact.

A stream of events ends when the load has ended and the timeline gets no more spans, when the server
drains, or after `MAX_STREAM_S`; the client then reconnects.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...loader.errors import TeneralError
from ...loader.timeline import Span
from ...runtime.state import State
from ..http.errors import NOT_READY_RETRY_AFTER_S, SERVER_ERROR, ApiError, retry_after
from ..http.json_bodies import encode
from ..http.sse import SSE, EventStream

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from ...loader.sources.base import Source
    from ...runtime.instance.instance import Instance
    from ..http.service import Service

MAX_STREAMS = 16
MAX_STREAM_S = 600.0
POLL_S = 0.1
QUIET_S = 2.0  # without a new span after the load's end: the start is over
SETTLED = frozenset({State.READY, State.FAILED})


class TimelineEvents:
    """`GET /timeline/events`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_streams = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One event with all spans so far, then one whenever there are new ones or the load has gone on. 503 where
        `MAX_STREAMS` clients are listening already.
        """
        if self._num_streams >= MAX_STREAMS:
            raise ApiError(
                503,
                f"{MAX_STREAMS} clients are reading the timeline's events already",
                kind=SERVER_ERROR,
                code="too_many_streams",
                headers=retry_after(NOT_READY_RETRY_AFTER_S),
            )
        self._num_streams += 1
        try:
            stream = EventStream(request, SSE, self._service.limits, comment=self._service.load_comment)
            async with stream:
                await self._send(stream)
                return await stream.finish()
        finally:
            self._num_streams -= 1

    async def _send(self, stream: EventStream) -> None:
        loop = asyncio.get_running_loop()
        instance = self._service.instance
        num_sent, before = 0, None
        began_s = changed_s = loop.time()
        while True:
            state = self._service.state
            spans = instance.timeline.spans(num_sent)
            load = _load_of(instance, state)
            if spans or load != before:
                num_sent += len(spans)
                before, changed_s = load, loop.time()
                await stream.send(encode(_event(instance, spans, load)))
            now_s = loop.time()
            is_over = state in SETTLED and now_s - changed_s > QUIET_S
            if is_over or state is State.DRAINING or now_s - began_s > MAX_STREAM_S:
                return
            if self._service.instance is not instance:
                return  # another one has taken its place
            await asyncio.sleep(POLL_S)


def _load_of(instance: Instance, state: State) -> dict[str, Any]:
    forecast = instance.forecast()
    failure = instance.failure
    return {
        "state": str(state),
        "model": instance.model_name,
        "progress": instance.progress(),
        "first_token": instance.config.first_token,
        "forecast": None
        if forecast is None
        else {
            "rate_bytes_per_s": round(forecast.rate_bytes_per_s),
            "first_token_s": round(forecast.first_token_s, 3),
            "is_upper_bound": forecast.is_upper_bound,
        },
        "error": None if failure is None else failure.message,
    }


def _event(instance: Instance, spans: list[Span], load: dict[str, Any]) -> dict[str, Any]:
    """The timeline's snapshot with the new spans only."""
    timeline = instance.timeline
    return {**timeline.head(), "spans": [span.as_json() for span in spans], "load": load}


class ArtifactRoute:
    """`GET /debug/artifact`: as `teneral inspect --json`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._described: tuple[Instance, dict[str, Any]] | None = None

    async def get(self, request: web.Request) -> web.Response:
        """503 until the manifest has been read."""
        instance = self._service.instance
        opened = instance.opened()
        if opened is None:
            raise ApiError(
                503,
                "the model's manifest has not been read yet",
                kind=SERVER_ERROR,
                code="loading",
                headers=retry_after(NOT_READY_RETRY_AFTER_S),
            )
        if self._described is None or self._described[0] is not instance:
            self._described = instance, await asyncio.to_thread(_describe, instance, *opened)
        return web.Response(body=encode(self._described[1]), content_type="application/json")


def _describe(instance: Instance, source: Source, manifest: Manifest) -> dict[str, Any]:
    from ...loader.tools.inspect import describe  # few look
    from ...runtime.backends.describe import describe_model
    from ...runtime.files import ModelFiles

    # The query of an http address may hold a signature.
    described = describe(manifest, source.url.partition("?")[0])
    try:
        config = ModelFiles(source, manifest, instance.config.load_options).read("config.json")
    except TeneralError:
        config = None
    if config is not None:
        described["model"] = describe_model(config)
    return described
