"""The paths of the Open Inference Protocol, and nothing of what answers them: every server mounts these, and most are
never asked, so all else is imported when the first request comes.

A model's name may have slashes. Where a version may stand (`…/versions/1/infer`) it is part of `name` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler as RouteHandler

    from ...function.handler import Handler
    from ...http.service import Service
    from .api import KServeFace

_VERBS = "infer|generate|generate_stream|ready|config|stats"
_NAME = rf"{{name:(?:(?!/(?:{_VERBS})$).)+}}"  # of what has no verb behind it


def kserve_routes(service: Service, handler: Handler | None) -> list[web.RouteDef]:
    """All of them. `handler` is the user's function, which then answers `infer`."""
    made: list[KServeFace] = []

    def face() -> KServeFace:
        if not made:
            from .api import KServeFace

            made.append(KServeFace(service, handler))
        return made[0]

    def to(name: str) -> RouteHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            response: web.StreamResponse = await getattr(face(), name)(request)
            return response

        return handle

    return [
        web.get("/v2", to("server_metadata")),
        web.get("/v2/health/live", to("live")),
        web.get("/v2/health/ready", to("ready")),
        web.get("/v2/models/stats", to("stats")),
        web.get("/v2/models/{name:.+}/ready", to("model_ready")),
        web.get("/v2/models/{name:.+}/config", to("config")),
        web.get("/v2/models/{name:.+}/stats", to("stats")),
        web.post("/v2/models/{name:.+}/infer", to("infer")),
        web.post("/v2/models/{name:.+}/generate", to("generate")),
        web.post("/v2/models/{name:.+}/generate_stream", to("generate_stream")),
        web.get(f"/v2/models/{_NAME}", to("model_metadata")),
        web.post("/v2/repository/index", to("index")),
        web.post("/v2/repository/models/{name:.+}/{action:load|unload}", to("change")),
    ]
