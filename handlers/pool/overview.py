"""The pool's own routes: `/v1/models`, `/v1/pool`, probes, metrics, and control of models."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from ...runtime.metrics import CONTENT_TYPE
from ..console.routes import PAGES
from ..http.edge import route_of
from ..http.errors import SERVER_ERROR, ApiError, retry_after
from ..http.json_bodies import encode
from ..http.key_limits import KeyLimits
from ..http.keys import ApiKeys, given_key
from ..http.routes import ANY, DOCUMENT, METRICS, STATUS, Route, Schema
from ..http.service import CALL, web_routes
from .admission import STANDBY_KEY
from .deployment import Deployment
from .metrics import Gauges
from .supervisor import Supervisor
from .versions import ModelState

audit_logger = logging.getLogger("teneral.pool.audit")
_NAMED_VERSION = re.compile(r"(.+)@([1-9][0-9]{0,11})")
_READINESS: Schema = {
    "type": "object",
    "required": ["state"],
    "properties": {"state": {"enum": ["starting", "ready", "draining"]}},
}
CONTROL = Route(
    "POST", "/v1/pool/{name:.+}/{action:sleep|wake|drain|promote|rollback}", "control", "pool",
    "Put a model to sleep, wake or drain it; promote or roll back a version, `name@8`",
    None, ANY,
)  # fmt: skip
# In place of a server's routes with the same paths; a pool passes all other requests on to instances.
ROUTES = (
    Route("GET", "/v1/pool", "pool", "pool", "Models, instances and memory", None, ANY),
    CONTROL,
    *(
        Route("GET", path, "models", "models", "All models and aliases, with their states", None, ANY)
        for path in ("/v1/models", "/models")
    ),
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
            ("/v1/health", "operate"),
            ("/ping", "operate"),
            ("/v2/health/ready", "kserve"),
        )
    ),
    METRICS,
    DOCUMENT,
)  # fmt: skip
OPEN_PATHS = frozenset(route.canonical for route in ROUTES if route.is_open)


def audit(request: web.Request, status: int, keys: ApiKeys | None) -> None:
    """One line of the log for a call of `control`: by which key and from where, whether it was allowed or not."""
    if route_of(request) != CONTROL.canonical:
        return
    key = 0 if keys is None else keys.place_of(given_key(request.headers))
    audit_logger.info(
        "%s %r: %s, from %s with %s, %s",
        request.match_info["action"],
        request.match_info["name"][:200],
        "done" if status == 200 else f"failed ({status})" if status in (499, 500) else f"refused ({status})",
        request.remote,
        f"key {key}" if key else "no key",
        CALL.get().request_id,
    )


class Overview:
    """Routes that ask no instance. One per pool."""

    def __init__(
        self,
        supervisor: Supervisor,
        keys: ApiKeys | None,
        *,
        may_control: bool,
        key_limits: KeyLimits | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._key_limits = key_limits
        self._keys = keys
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
        usage = None if self._key_limits is None else self._key_limits.usage()
        text = await asyncio.to_thread(self._supervisor.metrics.render, self._gauges(), usage)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def document(self, request: web.Request) -> web.Response:
        """The OpenAPI document of these routes, and of those that are passed on to instances."""
        if self._document is None:
            # It imports the types of all bodies, in a thread: requests go on meanwhile.
            self._document = await asyncio.to_thread(_make_document)
        return web.Response(body=self._document, content_type="application/json")

    async def control(self, request: web.Request) -> web.Response:
        """Put a model to sleep, wake it, or have it refuse requests until it is woken; promote a version, or roll one
        back.
        """
        if not self._may_control:
            raise ApiError(
                403, "models are not controlled here: start the pool with --model-control", code="forbidden"
            )
        action, name = request.match_info["action"], request.match_info["name"]
        version: int | None = None
        if action in ("promote", "rollback") and (found := _NAMED_VERSION.fullmatch(name)):
            name, version = found[1], int(found[2])
        state = self._state(name)
        match action:
            case "promote":
                await self._promote(state, version)
            case "rollback":
                await self._roll_back(state, version)
            case "sleep":
                self._supervisor.sleep(state)
            case "drain":
                state.paused = True
                self._supervisor.sleep(state)
            case _:
                state.paused = False
                await self._wake(state)
        return _json(self._describe(state))

    async def _promote(self, state: ModelState, version: int | None) -> None:
        """Have a version get all requests without one, once an instance of it is ready."""
        if version is None:
            raise ApiError(400, "name the version to promote: MODEL@VERSION", param="model")
        if str(version) in state.rejected:
            state.forgive(version)
            await self._look_again(state)
        deployment = state.get(version)
        if deployment is None:
            served = ", ".join(map(str, state.versions)) or "none"
            raise ApiError(
                404, f"version {version} of {state.model.name!r} is not served; those served: {served}",
                param="model", code="model_not_found",
            )  # fmt: skip
        await self._start(deployment)
        state.promote(version)
        await self._look_again(state)

    async def _roll_back(self, state: ModelState, version: int | None) -> None:
        """Have other versions get a version's requests, until it is promoted or its bytes change."""
        before = state.rejections
        newest = max(state.targets(), key=lambda each: each.release.version or 0, default=None)
        deployment = newest if version is None else state.get(version)
        number = None if deployment is None else deployment.release.version
        if deployment is None or number is None or not state.reject(deployment, "rolled back by a client"):
            raise ApiError(409, f"{state.model.name!r} has no such version that is served", code="conflict")
        await self._look_again(state)
        if str(number) not in state.rejected:
            state.restore(before)
            raise ApiError(
                409, f"{state.model.name!r} has no version but {number} that can be served", code="conflict"
            )

    async def _look_again(self, state: ModelState) -> None:
        if (task := self._supervisor.look_again(state)) is not None:
            await asyncio.shield(task)

    async def _wake(self, state: ModelState) -> None:
        deployment = next(iter(state.serving()), None)
        if deployment is None:
            raise ApiError(
                503, f"nothing of {state.model.name!r} can be served: {state.trouble}", kind=SERVER_ERROR
            )
        await self._start(deployment)

    async def _start(self, deployment: Deployment) -> None:
        """Wait until an instance is ready."""
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
            "targets": [deployment.name for deployment in state.targets()],
            "versions": [self._describe_deployment(deployment) for deployment in state.deployments()],
        }
        if state.trouble:
            described["trouble"] = state.trouble
        if state.promoted is not None:
            described["promoted"] = state.promoted
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
        return Gauges(instances, desired, waiting, memory, budget.shares())


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
