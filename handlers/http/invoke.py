"""POST /invoke: the user's function. One value comes back as JSON; several as a stream, of lines or of
events.

Which of the two it is shows only when the function gives a second value, unless it is a generator by its
definition, or the caller asks for a stream; so a first value is held back until then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

from aiohttp import web

from ...runtime.errors import CancelledError
from ..function.context import NO_FACTS, Context
from ..function.handler import Handler, run, up_to
from .json_bodies import Decoder, encode
from .service import CALL, Call, Service
from .sse import NDJSON, SSE, EventStream, Framing, complete

SESSION_HEADER = "Teneral-Session"  # `context.session`


class InvokeRoute:
    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler
        self._decoder: Decoder[Any] = Decoder(Any)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            event = self._decoder.decode(data) if data else None
            session = request.headers.get(SESSION_HEADER) or None
            async with invoking(self._service, self._handler, event, session=session) as values:
                return await respond(self._service, request, self._handler, values)


@asynccontextmanager
async def invoking(
    service: Service,
    handler: Handler,
    event: Any,
    *,
    session: str | None = None,
    platform: Mapping[str, Any] = NO_FACTS,
    trace_id: str | None = None,
) -> AsyncIterator[AsyncIterator[Any]]:
    """While in here: the values that the function gives, one after another. Leaving cancels what it has left running.

    Raises what the function does, in here; 504 when its time is up.
    """
    call = CALL.get()
    context = Context(
        service.instance,
        request_id=call.request_id,
        timeout_s=call.time_left_s(service.limits.request_timeout_s),
        session=session,
        platform=platform,
        trace_id=trace_id,
    )
    values = cast(AsyncGenerator[Any, None], run(handler, event, context))
    async with aclosing(values), aclosing(_in_time(values, context, call)) as timely:
        yield timely


async def _in_time(values: AsyncIterator[Any], context: Context, call: Call) -> AsyncGenerator[Any, None]:
    """The values; that the time is up is told as that, in a stream that has begun as well."""
    try:
        async for value in values:
            yield value
    except CancelledError as error:
        if context.remaining_time_s() > 0:
            raise
        raise call.overdue(error) from error


async def respond(
    service: Service, request: web.Request, handler: Handler, values: AsyncIterator[Any]
) -> web.StreamResponse:
    """One value whole; several as the stream that the caller's `Accept` names."""
    accept = request.headers.get("Accept", "")
    framing = SSE if SSE.content_type in accept else NDJSON
    if handler.kind.is_generator or framing is SSE or NDJSON.content_type in accept:
        return await stream_values(service, request, framing, [], values)
    first = [value async for value in up_to(2, values)]
    if len(first) > 1:
        return await stream_values(service, request, framing, first, values)
    return whole(first[0] if first else None)


async def stream_values(
    service: Service, request: web.Request, framing: Framing, first: list[Any], values: AsyncIterator[Any]
) -> web.StreamResponse:
    """All values as items of a stream; `first` are those that were read already."""

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
