"""Route handlers whose module is imported by their first request, and not during a cold start."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from .service import Service


def later(service: Service, module: str, kind: str, method: str) -> Handler:
    """A route handler that calls `method` of an object of class `kind`, made from the service;
    `module` is its full name.
    """
    made: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if not made:
            made.append(getattr(import_module(module), kind)(service))
        response: web.StreamResponse = await getattr(made[0], method)(request)
        return response

    return handle
