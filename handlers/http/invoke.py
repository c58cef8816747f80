"""POST /invoke: the user's function. One value comes back as JSON; several as a stream, of lines or of
events.

Which of the two it is shows only when the function gives a second value, unless it is a generator by its
definition, or the caller asks for a stream; so a first value is held back until then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web

from ...runtime.errors import CancelledError
from ..context import Context
from ..function import Handler, HandlerKind, run
from .errors import SERVER_ERROR, ApiError
from .respond import complete
from .responses import encode
from .schemas import Decoder
from .service import CALL, Service
from .sse import NDJSON, SSE, EventStream, Framing

SESSION_HEADER = "Teneral-Session"  # `context.session`


class InvokeRoute:
    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler
        self._decoder: Decoder[Any] = Decoder(Any)

    async def post(self, request: web.Request) -> web.StreamResponse:
        service, call = self._service, CALL.get()
        async with service.admission.body(request) as data:
            event = self._decoder.decode(data) if data else None
            timeout_s = service.limits.request_timeout_s
            session = request.headers.get(SESSION_HEADER)
            context = Context(
                service.instance, request_id=call.request_id, timeout_s=timeout_s, session=session or None
            )
            values = cast(AsyncGenerator[Any, None], run(self._handler, event, context))
            async with aclosing(values):
                try:
                    return await self._respond(request, self._handler, values)
                except CancelledError as error:
                    if context.remaining_time_s() > 0:
                        raise
                    raise ApiError(504, error.message, kind=SERVER_ERROR, code="request_timeout") from error

    async def _respond(
        self, request: web.Request, handler: Handler, values: AsyncIterator[Any]
    ) -> web.StreamResponse:
        accept = request.headers.get("Accept", "")
        framing = SSE if SSE.content_type in accept else NDJSON
        is_generator = handler.kind in (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)
        if is_generator or framing is SSE or NDJSON.content_type in accept:
            return await self._stream(request, framing, [], values)
        first = [value async for value in _up_to(2, values)]
        if len(first) > 1:
            return await self._stream(request, framing, first, values)
        return _whole(first[0] if first else None)

    async def _stream(
        self, request: web.Request, framing: Framing, first: list[Any], values: AsyncIterator[Any]
    ) -> web.StreamResponse:
        async def send() -> None:
            if first:
                await stream.send(*map(encode, first))
            async for value in values:
                await stream.send(encode(value))

        async with EventStream(request, framing, self._service.limits) as stream:
            return await complete(stream, CALL.get(), send())


def _whole(value: Any) -> web.Response:
    if isinstance(value, bytes):
        return web.Response(body=value, content_type="application/octet-stream")
    return web.Response(body=encode(value), content_type="application/json")


async def _up_to(count: int, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The first values, so many or fewer; the rest can still be read from `values`."""
    while count > 0:
        try:
            yield await anext(values)
        except StopAsyncIteration:
            return
        count -= 1
