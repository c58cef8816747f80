"""Handlers of routes whose module is imported by their first request: a cold start does without them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from .service import Service


def later(service: Service, module: str, kind: str, method: str) -> Handler:
    """The `method` of an object that `kind`, a class of the module with this full name, makes of the service."""
    made: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if not made:
            made.append(getattr(import_module(module), kind)(service))
        response: web.StreamResponse = await getattr(made[0], method)(request)
        return response

    return handle
