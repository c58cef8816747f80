"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from ..http.json_bodies import encode
from ..http.service import Service, max_context_of
from .responses import Architecture, Model, ModelList

if TYPE_CHECKING:
    from ...runtime.text.settings import TextSettings


class ModelRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: web.Request) -> web.Response:
        return web.Response(
            body=encode(ModelList([self._model(), *self._adapters()])), content_type="application/json"
        )

    async def get(self, request: web.Request) -> web.Response:
        """The base, or an adapter that is there."""
        name = request.match_info["id"]
        found = next((each for each in self._adapters() if each.id == name), None)
        if found is None:
            self._service.check_model(name)
        return web.Response(body=encode(found or self._model()), content_type="application/json")

    def _model(self) -> Model:
        instance = self._service.instance
        return Model(instance.model_name, instance.created_unix_s, **self._known())

    def _known(self) -> dict[str, Any]:
        """The fields that the loaded model tells."""
        context, settings = max_context_of(self._service.instance), self._service.instance.text_settings
        if context is None or not settings.done():
            return {}
        return {
            "max_model_len": context,
            "architecture": Architecture(_inputs_of(settings.result()), ["text"]),
        }

    def _adapters(self) -> Sequence[Model]:
        """Those in memory. One that was loaded by a name of its own has it; others are the base's."""
        registry, base = self._service.instance.adapters, self._service.instance.model_name
        if registry is None:
            return []
        return [
            Model(
                adapter.name if is_registered else f"{base}:{adapter.name}",
                adapter.created_unix_s,
                parent=base,
                **self._known(),
            )
            for adapter, is_registered in registry.listed()
        ]


def _inputs_of(settings: TextSettings) -> list[Literal["text", "image", "audio"]]:
    if settings.speech is not None:
        return ["audio"]
    return ["text"] if settings.images is None else ["text", "image"]
