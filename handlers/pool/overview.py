"""The pool's own routes: `/v1/models`, `/v1/pool`, probes, metrics, and control of models."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from ...runtime.metrics import CONTENT_TYPE
from ..console.routes import PAGES
from ..http.errors import SERVER_ERROR, ApiError, retry_after
from ..http.json_bodies import encode
from ..http.routes import ANY, DOCUMENT, METRICS, STATUS, Route, Schema
from ..http.service import web_routes
from .admission import STANDBY_KEY
from .deployment import Deployment
from .metrics import Gauges
from .supervisor import Supervisor
from .versions import ModelState

_READINESS: Schema = {
    "type": "object",
    "required": ["state"],
    "properties": {"state": {"enum": ["starting", "ready", "draining"]}},
}
# In place of a server's routes with the same paths; a pool passes all other requests on to instances.
ROUTES = (
    Route("GET", "/v1/pool", "pool", "pool", "Models, instances and memory", None, ANY),
    Route(
        "POST", "/v1/pool/{name:.+}/{action:sleep|wake|drain}", "control", "pool",
        "Put a model to sleep, wake or drain it",
        None, ANY,
    ),
    Route("GET", "/v1/models", "models", "models", "All models and aliases, with their states", None, ANY),
    Route("GET", "/v1/models/{id:.+}", "model", "models", "One of them", None, ANY),
    Route("GET", "/livez", "livez", "operate", "The process lives", None, STATUS, is_open=True),
    Route(
        "GET", "/v2/models/{name:.+}/ready", "model_ready", "kserve",
        "Requests to the model are answered, if need be after a start",
        None, ".platforms.kserve.schemas:ModelReady", status=("200", "503"), is_open=True,
    ),
    Route("GET", "/v2/health/live", "livez", "kserve", "Liveness", None, STATUS, is_open=True),
    *(
        Route(
            "GET", path, "readyz", tag, "Each model has its warm instances",
            None, _READINESS, status=("200", "503"), is_open=True,
        )
        for path, tag in (
            ("/readyz", "operate"),
            ("/health", "operate"),
            ("/ping", "operate"),
            ("/v2/health/ready", "kserve"),
        )
    ),
    METRICS,
    DOCUMENT,
)  # fmt: skip
OPEN_PATHS = frozenset(route.canonical for route in ROUTES if route.is_open)


class Overview:
    """Routes that ask no instance. One per pool."""

    def __init__(self, supervisor: Supervisor, *, may_control: bool) -> None:
        self._supervisor = supervisor
        self._may_control = may_control
        self._created_unix_s = int(time.time())
        self._document: bytes | None = None  # made by its first request

    def routes(self) -> Iterator[web.RouteDef]:
        return web_routes(ROUTES, lambda name: getattr(self, name))

    async def livez(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.Response:
        """200 when every model has its `min_warm` instances."""
        is_ready = self._supervisor.is_warm and not self._supervisor.draining
        state = "draining" if self._supervisor.draining else "ready" if is_ready else "starting"
        return _json({"state": state}, status=200 if is_ready else 503)

    async def model_ready(self, request: web.Request) -> web.Response:
        """200 when requests to the model are answered, if need be after a start."""
        state = self._state(request.match_info["name"].partition("/versions/")[0])
        is_ready = not state.paused and any(not d.is_failing for d in state.serving())
        return _json({"name": state.model.name, "ready": is_ready}, status=200 if is_ready else 503)

    async def models(self, request: web.Request) -> web.Response:
        """OpenAI's list of models, with aliases, and each model's state and versions."""
        return _json({"object": "list", "data": list(self._entries())})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"].casefold()
        found = next((entry for entry in self._entries() if entry["id"].casefold() == name), None)
        if found is None:
            raise _no_model(request.match_info["id"])
        return _json(found)

    async def pool(self, request: web.Request) -> web.Response:
        """Everything that the supervisor knows."""
        supervisor = self._supervisor
        budget = supervisor.budget
        return _json(
            {
                "file": supervisor.pool.file,
                "may_control": self._may_control,
                "state": "draining" if supervisor.draining else "ready" if supervisor.is_warm else "starting",
                "memory": {
                    "budget_bytes": budget.limit_bytes,
                    "reserved_bytes": budget.charged_bytes,
                    "used_bytes": budget.used_bytes,
                    "standby_bytes": budget.charge_of(STANDBY_KEY),
                },
                "models": {name: self._describe(state) for name, state in supervisor.models.items()},
                "aliases": {name: dict(weights) for name, weights in supervisor.pool.aliases.items()},
                "counts": supervisor.metrics.counts(),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._supervisor.metrics.render, self._gauges())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def document(self, request: web.Request) -> web.Response:
        """The OpenAPI document of these routes, and of those that are passed on to instances."""
        if self._document is None:
            # It imports the types of all bodies, in a thread: requests go on meanwhile.
            self._document = await asyncio.to_thread(_make_document)
        return web.Response(body=self._document, content_type="application/json")

    async def control(self, request: web.Request) -> web.Response:
        """Put a model to sleep, wake it, or have it refuse requests until it is woken."""
        if not self._may_control:
            raise ApiError(
                403, "models are not controlled here: start the pool with --model-control", code="forbidden"
            )
        state = self._state(request.match_info["name"])
        match request.match_info["action"]:
            case "sleep":
                self._supervisor.sleep(state)
            case "drain":
                state.paused = True
                self._supervisor.sleep(state)
            case _:
                state.paused = False
                await self._wake(state)
        return _json(self._describe(state))

    async def _wake(self, state: ModelState) -> None:
        deployment = next(iter(state.serving()), None)
        if deployment is None:
            raise ApiError(
                503, f"nothing of {state.model.name!r} can be served: {state.trouble}", kind=SERVER_ERROR
            )
        lease = await self._supervisor.acquire(deployment)
        assert lease is not None
        self._supervisor.hand_back(lease)

    def _state(self, name: str) -> ModelState:
        states = self._supervisor.models
        found = next((each for each in states if each.casefold() == name.casefold()), None)
        if found is None:
            raise _no_model(name)
        return states[found]

    def _entries(self) -> Iterator[dict[str, Any]]:
        base = {"object": "model", "created": self._created_unix_s, "owned_by": "teneral"}
        for name, state in self._supervisor.models.items():
            yield {"id": name, **base, "teneral": {"state": _state_of(state), "versions": state.versions}}
        for name in self._supervisor.pool.aliases:
            yield {"id": name, **base, "teneral": {"state": "alias", "versions": []}}

    def _describe(self, state: ModelState) -> dict[str, Any]:
        described: dict[str, Any] = {
            "state": _state_of(state),
            "versions": [self._describe_deployment(deployment) for deployment in state.deployments()],
        }
        if state.trouble:
            described["trouble"] = state.trouble
        if state.rejected:
            described["rejected"] = dict(state.rejected)
        return described

    def _describe_deployment(self, deployment: Deployment) -> dict[str, Any]:
        return {
            "name": deployment.name,
            "address": deployment.release.address,
            "revision": deployment.release.revision,
            "state": deployment.state(),
            "is_target": deployment.is_target,
            "desired": self._supervisor.wants(deployment),
            "waiting": len(deployment.waiting),
            "starting": len(deployment.starting),
            "need_bytes": deployment.need_bytes,
            **({"reason": deployment.reason, "failures": deployment.failures} if deployment.reason else {}),
            "instances": [
                {
                    "key": server.key,
                    "process": server.process.pid,
                    "url": server.process.url,
                    "start": server.process.kind,
                    "start_s": round(server.start_s, 3),
                    "in_work": server.in_work,
                    "served": server.served,
                    "closing": server.closing,
                    "memory_bytes": self._supervisor.budget.charge_of(server.key),
                }
                for server in deployment.servers.values()
            ],
        }

    def _gauges(self) -> Gauges:
        supervisor, budget = self._supervisor, self._supervisor.budget
        instances: Counter[tuple[str, ...]] = Counter()
        desired: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for deployment in supervisor.deployments():
            name, version = deployment.model.name, str(deployment.release.version or "")
            instances[name, version, "ready"] += len(deployment.ready)
            instances[name, version, "starting"] += len(deployment.starting)
            desired[name] += supervisor.wants(deployment)
            waiting[name] += len(deployment.waiting)
        memory = {"budget": budget.limit_bytes, "used": budget.used_bytes, "reserved": budget.charged_bytes}
        return Gauges(instances, desired, waiting, memory)


def _make_document() -> bytes:
    # Few clients read it.
    from ..api_document.document import document

    pages = {route.path for route in PAGES}
    return encode(document(OPEN_PATHS | pages, (*ROUTES, *PAGES)))


def _state_of(state: ModelState) -> str:
    """ready, starting, failing, asleep, drained, or unavailable when no version can be served."""
    if state.paused:
        return "drained"
    states = [deployment.state() for deployment in state.serving()]
    return next(
        (each for each in ("ready", "starting", "failing", "asleep") if each in states), "unavailable"
    )


def _no_model(name: str) -> ApiError:
    return ApiError(
        404, f"the model {name[:200]!r} does not exist here", param="model", code="model_not_found"
    )


def _json(value: Any, *, status: int = 200) -> web.Response:
    headers = retry_after(1) if status == 503 else {}
    return web.Response(status=status, body=encode(value), content_type="application/json", headers=headers)
