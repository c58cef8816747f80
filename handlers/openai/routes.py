"""The routes of OpenAI's API, and those that other servers of models have added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from ..http.service import later
from .completions import CompletionRoute
from .embeddings import EmbeddingRoute, ModelRoutes

if TYPE_CHECKING:
    from ..http.service import Service

COHERE_RERANK = "/v2/rerank"  # below the Open Inference Protocol's prefix, and not of it

# Path, module, class and method of routes that are imported by their first request: a cold start does without them.
_LATER = (
    ("/v1/chat/completions", "chat", "ChatRoute", "post"),
    ("/v1/responses", "responses_api", "ResponsesRoute", "post"),
    ("/v1/load_lora_adapter", "adapters", "AdapterRoutes", "load"),
    ("/v1/unload_lora_adapter", "adapters", "AdapterRoutes", "unload"),
    ("/tokenize", "tokens", "TokenRoutes", "tokenize"),
    ("/detokenize", "tokens", "TokenRoutes", "detokenize"),
    ("/v1/classify", "rerank", "ClassifyRoute", "post"),
    ("/classify", "rerank", "ClassifyRoute", "post"),
    ("/v1/score", "rerank", "ScoreRoute", "post"),
    ("/score", "rerank", "ScoreRoute", "post"),
    ("/v1/rerank", "rerank", "RerankRoute", "post"),  # Jina's, and Cohere's first
    (COHERE_RERANK, "rerank", "RerankRoute", "post"),  # Cohere's
    ("/rerank", "rerank", "RerankRoute", "post"),
)


def openai_routes(service: Service) -> list[web.RouteDef]:
    models = ModelRoutes(service)
    return [
        web.get("/v1/models", models.list),
        web.get("/v1/models/{id:.+}", models.get),  # names may have slashes: org/model
        web.post("/v1/completions", CompletionRoute(service).post),
        web.post("/v1/embeddings", EmbeddingRoute(service).post),
        *(
            web.post(path, later(service, f"{__package__}.{module}", *where))
            for path, module, *where in _LATER
        ),
    ]
