"""Responses that are made in the background, of one server, and the streams of their events.

A stream's events are kept while it is made and for a while after, so that a client can leave it and
come back for those after the last that it has. An event's number is its place among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from aiohttp import web

from ...runtime.errors import CapacityError, RequestError
from ..http.errors import ApiError
from ..http.json_bodies import encode
from ..http.service import CALL, HttpCall, Service
from ..http.sse import EventStream, Framing, complete
from .generation import generate, send_steps
from .parameters import own_names
from .response_keeper import Keeper
from .response_store import IN_PROGRESS, LEASE_S, QUEUED
from .responses_api import ResponsesFormat
from .responses_body import OWN_NAMES

MAX_BACKGROUND = 32  # responses that are made at a time
MAX_EVENTS_BYTES = 4 << 20  # of one response
EVENTS_S = 300.0  # from a response's end, for the events that are kept of it
MAX_ENDED = 32  # responses whose events are kept after their end


class BackgroundResponse:
    """One response, and the events of its stream. A `Receiver`."""

    def __init__(self, framing: Framing) -> None:
        self.task: asyncio.Task[None] | None = None
        self.framing = framing
        self.ended_s: float | None = None
        self._events: list[bytes] = []
        self._num_bytes = 0
        self._is_cut = False
        self._changed = asyncio.Event()

    @property
    def has_events(self) -> bool:
        """False for a response that is made without a stream."""
        return bool(self._events)

    async def send(self, *items: bytes) -> None:
        for event in (event for item in items for event in item.split(b"\n\n")):
            self._num_bytes += len(event)
            self._is_cut |= self._num_bytes > MAX_EVENTS_BYTES
            if not self._is_cut:
                self._events.append(event)
        self._wake()

    def abort(self) -> None:
        """Never needed: nothing is waited for."""

    def end(self) -> None:
        self.ended_s = time.monotonic()
        self._wake()

    async def follow(self, stream: EventStream, after: int) -> None:
        """Send the events with higher numbers, until the last. Raises `ApiError` where they are too many."""
        place = after + 1
        while True:
            changed = self._changed
            if self._events[place:]:
                events, place = self._events[place:], len(self._events)
                await stream.send(*events)
            elif self._is_cut:
                raise ApiError(
                    400, "the stream is too long to be kept: get the response whole", param="stream"
                )
            elif self.ended_s is not None:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponses:
    """Those of a server, by their ids. For `service.shared`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[str, BackgroundResponse] = {}
        self._ended: dict[str, BackgroundResponse] = {}  # streams, the oldest first

    async def begin(
        self, request: web.Request, fmt: ResponsesFormat, keeper: Keeper, body_bytes: int
    ) -> web.StreamResponse:
        """Begin a response, and answer with it as it is, or with its stream: it is found by its id."""
        if CALL.get().tells_tokens:
            raise RequestError(
                "background is not served by a pool whose keys have limits: it counts the tokens that it passes on",
                param="background",
            )
        if len(self._running) >= MAX_BACKGROUND:
            raise CapacityError(
                f"{MAX_BACKGROUND} responses are made in the background, which is the limit",
                retry_after_s=1.0,
            )
        made = self._running[fmt.id] = BackgroundResponse(fmt.framing)  # before the store is waited for
        try:
            queued = fmt.response(QUEUED, None)
            if not await keeper.put(queued):
                raise RequestError(
                    "background needs store, and this response is larger than the store", param="background"
                )
        except BaseException:
            del self._running[fmt.id]
            raise
        if fmt.body.stream:
            await made.send(*fmt.queued(queued))
        made.task = asyncio.create_task(self._make(made, fmt, keeper, body_bytes))
        made.task.add_done_callback(partial(self._ended_one, fmt, made))
        if fmt.body.stream:
            return await self._follow(request, made, -1)
        return web.Response(body=encode(queued), content_type="application/json")

    async def resume(self, request: web.Request, response_id: str, after: int) -> web.StreamResponse:
        """The stream of a response from the event behind the number `after`. Raises `ApiError` without such events."""
        self._drop_old()
        made = self._running.get(response_id) or self._ended.get(response_id)
        if made is None or not made.has_events:
            raise ApiError(
                400,
                "there is no stream of this response: the events of one that is made with background and stream are "
                f"kept by the instance that makes it, for {EVENTS_S:g} s after its end; get the response whole",
                param="stream",
            )
        return await self._follow(request, made, after)

    async def cancel(self, response_id: str) -> bool:
        """End a response that is being made, and wait for its end. False for others."""
        made = self._running.get(response_id)
        if made is None or made.task is None:
            return False
        # Once: a second cancellation, also that of a client which leaves, would cut off what the first one writes.
        if not made.task.cancelling():
            made.task.cancel()
        await asyncio.wait([made.task])
        return True

    def forget(self, response_id: str) -> None:
        """Drop the events of a response that has ended."""
        self._ended.pop(response_id, None)

    async def _follow(self, request: web.Request, made: BackgroundResponse, after: int) -> web.StreamResponse:
        limits, comment = self._service.limits, self._service.load_comment
        async with EventStream(request, made.framing, limits, comment=comment) as stream:
            return await complete(stream, CALL.get(), made.follow(stream, after))

    async def _make(
        self, made: BackgroundResponse, fmt: ResponsesFormat, keeper: Keeper, body_bytes: int
    ) -> None:
        service = self._service
        call = HttpCall(CALL.get().request_id, key_place=CALL.get().key_place)
        CALL.set(call)
        try:
            async with service.in_flight.work() as call.work:
                service.in_flight.take_place(call.work)
                renew = partial(keeper.put, fmt.response(IN_PROGRESS, None))
                with service.admission.answer() as charge, own_names(OWN_NAMES), _renewing(renew):
                    if fmt.body.stream:
                        await send_steps(made, service, call, fmt, body_bytes, fmt.keep)
                        return
                    outcomes, usage = await generate(service, call, fmt, body_bytes, charge=charge)
                    whole = await service.text_threads.run(body_bytes, fmt.whole, outcomes, usage)
            await fmt.keep(whole)
        except asyncio.CancelledError:
            await keeper.put(fmt.response("cancelled", None))
            if fmt.body.stream:
                message = "the response was cancelled"
                await made.send(fmt.event("error", code="cancelled", message=message, param=None))
            raise
        except Exception as error:  # noqa: BLE001 - the client finds it in the response
            failure = call.explain(error)
            # OpenAI's clients know no other codes than these and some of images.
            code = "server_error" if failure.status >= 500 else "invalid_prompt"
            code = "rate_limit_exceeded" if failure.status == 429 else code
            failed = fmt.response("failed", None, error={"code": code, "message": failure.message})
            await keeper.put(failed)
            if fmt.body.stream:
                await made.send(fmt.event("response.failed", response=failed))
        finally:
            if service.key_limits is not None and call.key_place:
                service.key_limits.spend(call.key_place, call.prompt_tokens + call.generated_tokens)

    def _ended_one(self, fmt: ResponsesFormat, made: BackgroundResponse, _: object) -> None:
        made.end()
        del self._running[fmt.id]
        if made.has_events:
            self._ended[fmt.id] = made
        self._drop_old()

    def _drop_old(self) -> None:
        limit_s = time.monotonic() - EVENTS_S
        while self._ended:
            name, oldest = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and (oldest.ended_s or 0.0) > limit_s:
                return
            del self._ended[name]


@contextlib.contextmanager
def _renewing(renew: Callable[[], Awaitable[bool]]) -> Iterator[None]:
    """Write a response now and again, so that other instances see that it is still being made."""

    async def run() -> None:
        while True:
            with contextlib.suppress(ApiError):  # the store is down: the next attempt may be in time
                await renew()
            await asyncio.sleep(LEASE_S / 3)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
