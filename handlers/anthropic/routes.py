"""The routes of Anthropic's API, imported by their first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from ..http.service import later

if TYPE_CHECKING:
    from ..http.service import Service

PREFIX = "/v1/messages/"  # of paths whose errors have Anthropic's shape, with a slash behind them


def anthropic_routes(service: Service) -> list[web.RouteDef]:
    module = f"{__package__}.messages"
    return [
        web.post("/v1/messages", later(service, module, "MessageRoutes", "post")),
        web.post("/v1/messages/count_tokens", later(service, module, "MessageRoutes", "count_tokens")),
    ]
