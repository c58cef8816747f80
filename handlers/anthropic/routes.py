"""The routes of Anthropic's API, imported by their first request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from ..http.service import later

if TYPE_CHECKING:
    from ..http.service import Service


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """True if errors have Anthropic's shape: by the path, or by the header that Anthropic's clients send to
    every path. `headers` ignores case.
    """
    return f"{path}/".startswith("/v1/messages/") or "anthropic-version" in headers


def anthropic_routes(service: Service) -> list[web.RouteDef]:
    module = f"{__package__}.messages"
    return [
        web.post("/v1/messages", later(service, module, "MessageRoutes", "post")),
        web.post("/v1/messages/count_tokens", later(service, module, "MessageRoutes", "count_tokens")),
    ]
