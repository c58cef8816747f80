"""GET /debug/kv: what the KV pool holds, for whoever may ask this server anything."""

from __future__ import annotations

import asyncio

from aiohttp import web

from .errors import SERVER_ERROR, ApiError, retry_after
from .json_bodies import encode
from .retry import NOT_READY_RETRY_AFTER_S
from .service import Service


class DebugRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def kv(self, request: web.Request) -> web.Response:
        """The pool's blocks and chains as `PoolView`; 503 while the model loads."""
        if not self._service.instance.engine.done():
            raise ApiError(
                503,
                "the model is still loading: there is no KV pool yet",
                kind=SERVER_ERROR,
                code="loading",
                headers=retry_after(NOT_READY_RETRY_AFTER_S),
            )
        engine = await self._service.ready(self._service.instance.engine)
        # In a thread: a large pool takes some milliseconds, and the engine's lock.
        view = await asyncio.to_thread(engine.kv_view)
        return web.Response(body=encode(view), content_type="application/json")
