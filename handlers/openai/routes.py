"""The routes of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from .chat import ChatRoute
from .completions import CompletionRoute
from .embeddings import EmbeddingRoute, ModelRoutes

if TYPE_CHECKING:
    from ..http.service import Service


def openai_routes(service: Service) -> list[web.RouteDef]:
    models = ModelRoutes(service)
    return [
        web.get("/v1/models", models.list),
        web.get("/v1/models/{id:.+}", models.get),  # names may have slashes: org/model
        web.post("/v1/completions", CompletionRoute(service).post),
        web.post("/v1/chat/completions", ChatRoute(service).post),
        web.post("/v1/embeddings", EmbeddingRoute(service).post),
    ]
