"""Triton's model repository extension: the list of models, and loading and unloading the server's
one.

Load and unload are refused unless the server was started with `--model-control`: permission to send
requests does not include permission to unload the model.
"""

from __future__ import annotations

from aiohttp import web

from ....runtime.state import State
from ...http.errors import ApiError
from ...http.json_bodies import Decoder, encode
from ...http.service import CALL, Service
from .options import flag
from .schemas import ChangeRequest, IndexRequest, ModelIndex

# Triton's names.
_STATES = {
    State.LOADING: "LOADING",
    State.PARTIAL: "READY",
    State.READY: "READY",
    State.DRAINING: "UNLOADING",
    State.FAILED: "UNAVAILABLE",
    State.UNLOADED: "UNAVAILABLE",
}


class Repository:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._index = Decoder(IndexRequest)
        self._change = Decoder(ChangeRequest)

    async def index(self, request: web.Request, *, version: str) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            asked = self._index.decode(data) if data else IndexRequest()
        state, failure = service.state, service.instance.failure
        reason = service.slot.reason if failure is None else failure.message
        entry = ModelIndex(service.instance.model_name, version, _STATES[state], reason)
        entries = [entry] if state.can_answer or not asked.ready else []
        return web.Response(body=encode(entries), content_type="application/json")

    async def change(self, request: web.Request, action: str) -> web.Response:
        """Change the model, and return when done. Raises 403, and the error of a load."""
        service, call = self._service, CALL.get()
        async with service.admission.body(request) as data:
            asked = self._change.decode(data) if data else ChangeRequest()
        self._check(action, asked)
        if action == "unload":
            await service.slot.unload(call.work, drain_timeout_s=service.limits.unload_drain_s)
        else:
            await service.slot.load(call.work)
        return web.Response(status=200)

    def _check(self, action: str, asked: ChangeRequest) -> None:
        if not self._service.instance.config.model_control:
            raise ApiError(
                403,
                "this server does not let its model be loaded and unloaded: start it with --model-control",
                code="model_control_off",
            )
        parameters = dict(asked.parameters or {})
        if action == "unload":
            flag(parameters, "unload_dependents")
            parameters.pop("unload_dependents", None)  # there are none
        for name in parameters:
            message = f"{name[:100]!r} is not a parameter of {action}: the server's configuration determines the model"
            raise ApiError(400, message, param="parameters")
