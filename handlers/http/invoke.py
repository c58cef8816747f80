"""POST /invoke: the user's function. A returned value becomes JSON; yielded ones a stream of lines
or of events.

A function that yields, or that returns an iterator, is a stream from its first value on, which is
sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

from aiohttp import web

from ...runtime.errors import CancelledError
from ..function.context import NO_FACTS, Context
from ..function.handler import Handler, run, up_to
from .json_bodies import JsonDecoder, encode
from .service import CALL, HttpCall, Service
from .sse import NDJSON, SSE, EventStream, Framing, complete

SESSION_HEADER = "Teneral-Session"  # `context.session`


class InvokeRoute:
    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler
        self._decoder: JsonDecoder[Any] = JsonDecoder(Any)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            event = self._decoder.decode(data) if data else None
            session = request.headers.get(SESSION_HEADER) or None
            async with invoking(self._service, self._handler, event, session=session) as values:
                return await respond(self._service, request, self._handler, values)


class HandlerValues(AsyncIterator[Any]):
    """A function's values as they are made. `is_stream` is known with the first of them."""

    def __init__(self, values: AsyncIterator[Any], is_stream: asyncio.Event) -> None:
        self._values = values
        self._is_stream = is_stream

    @property
    def is_stream(self) -> bool:
        """True if the function yields, or returned an iterator."""
        return self._is_stream.is_set()

    async def __anext__(self) -> Any:
        return await anext(self._values)


@asynccontextmanager
async def invoking(
    service: Service,
    handler: Handler,
    event: Any,
    *,
    session: str | None = None,
    platform: Mapping[str, Any] = NO_FACTS,
    trace_id: str | None = None,
) -> AsyncIterator[HandlerValues]:
    """A context with the function's values, one after another. Leaving it cancels the rest.

    Raises the function's errors inside; 504 at the time limit.
    """
    call = CALL.get()
    context = Context(
        service.instance,
        request_id=call.request_id,
        timeout_s=call.time_left_s(service.limits.request_timeout_s),
        session=session,
        platform=platform,
        trace_id=trace_id,
        on_tokens=call.add_tokens,
    )
    is_stream = asyncio.Event()
    values = cast(AsyncGenerator[Any, None], run(handler, event, context, on_stream=is_stream.set))
    async with aclosing(values), aclosing(_in_time(values, context, call)) as timely:
        yield HandlerValues(timely, is_stream)


async def _in_time(values: AsyncIterator[Any], context: Context, call: HttpCall) -> AsyncGenerator[Any, None]:
    """The values; an expired time limit is reported as such, also in a stream that has begun."""
    try:
        async for value in values:
            yield value
    except CancelledError as error:
        if context.remaining_time_s() > 0:
            raise
        raise call.overdue(error) from error


async def respond(
    service: Service, request: web.Request, handler: Handler, values: HandlerValues
) -> web.StreamResponse:
    """Respond with a returned value as a whole; with yielded ones as the stream of the caller's
    `Accept`.
    """
    accept = request.headers.get("Accept", "")
    framing = SSE if SSE.content_type in accept else NDJSON
    if handler.kind.is_generator or framing is SSE or NDJSON.content_type in accept:
        return await stream_values(service, request, framing, [], values)
    first = [value async for value in up_to(1, values)]
    if values.is_stream:
        return await stream_values(service, request, framing, first, values)
    return whole(first[0] if first else None)


async def stream_values(
    service: Service, request: web.Request, framing: Framing, first: list[Any], values: AsyncIterator[Any]
) -> web.StreamResponse:
    """Send all values as items of a stream; `first` are those that were read already."""

    async def send() -> None:
        if first:
            await stream.send(*map(encode, first))
        async for value in values:
            await stream.send(encode(value))

    async with EventStream(request, framing, service.limits) as stream:
        return await complete(stream, CALL.get(), send())


def whole(value: Any) -> web.Response:
    if isinstance(value, bytes):
        return web.Response(body=value, content_type="application/octet-stream")
    return web.Response(body=encode(value), content_type="application/json")
