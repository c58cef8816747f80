"""GET /v1/models and /v1/models/{id}: there is one."""

from __future__ import annotations

from aiohttp import web

from ..http.json_bodies import encode
from ..http.service import Service
from .responses import Model, ModelList


class ModelRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: web.Request) -> web.Response:
        return web.Response(body=encode(ModelList([self._model()])), content_type="application/json")

    async def get(self, request: web.Request) -> web.Response:
        self._service.check_model(request.match_info["id"])
        return web.Response(body=encode(self._model()), content_type="application/json")

    def _model(self) -> Model:
        instance = self._service.instance
        return Model(instance.model_name, instance.created_unix_s)
