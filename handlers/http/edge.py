"""The edge: what every request passes at the port of a server and of a pool.

Its id, the names and pages that may call, its API key, the bounds on connections, its errors, its metrics and its log
line. `Edge` has what both ports do; `ServerEdge` adds the places, deadlines and figures of an instance's requests, and
`pool/run.py` the pages and counts of several models.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from ...runtime.state import State
from .connections import Connections
from .errors import ApiError, as_api_error
from .inflight import deadline_of
from .routes import ROUTES
from .service import CALL, TOKENS_HEADER, HttpCall, Service
from .web_pages import SAFE_METHODS, Hosts, Origins, check_media_type

if TYPE_CHECKING:
    from .key_limits import KeyLimits
    from .keys import ApiKeys
    from .spans import RequestTimes, TraceParent

OPEN_PATHS = frozenset(route.path for route in ROUTES if route.is_open)
QUIET_PATHS = frozenset({"/metrics", "/timeline", "/timeline/events", "/debug/kv", "/debug/artifact"})
MAX_LOGGED_PATH_CHARS = 200
# No client receives it: for metrics only.
CLIENT_GONE = 499
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>(?:-.{0,200})?)\Z"
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class EdgeRules(Struct, frozen=True):
    """The edge's rules for the routes, which it does not import. Paths are patterns of routes."""

    open_paths: frozenset[str] = OPEN_PATHS  # probes: answered without a key, and logged for debugging only
    quiet_paths: frozenset[str] = QUIET_PATHS  # logged for debugging only, too
    control_paths: frozenset[str] = frozenset()  # work without a model
    takes_any_media: bool = False  # as in `check_media_type`
    # Requests over the local socket are the platform's own, and no web page's.
    trusts_inside: bool = True
    # Of a request's path, headers and id.
    error_response: Callable[[str, Mapping[str, str], ApiError, str], web.Response] = (
        lambda _path, _headers, error, _id: error.response()
    )


class Edge(ABC):
    """The edge of one port. Used on its event loop only."""

    # A front of instances that check the origins of their own models: here no page of another origin may even
    # read, and only preflights have headers for pages.
    is_front = False

    def __init__(
        self,
        connections: Connections,
        keys: ApiKeys | None,
        rules: EdgeRules,
        logger: logging.Logger,
        *,
        key_limits: KeyLimits | None = None,
    ) -> None:
        """With `keys`, every route except the open ones needs one of them, and so does an unknown path; `key_limits`
        are theirs. `logger` gets errors, and its child `access` a line for each request.
        """
        self.connections = connections
        self.keys = keys
        self.key_limits = key_limits
        self._rules = rules
        self._logger = logger
        self._access_logger = logger.getChild("access")

    def application(self) -> web.Application:
        """An application behind this edge, without routes."""
        app = web.Application(middlewares=[self._handle])
        app.on_response_prepare.append(self._stamp)
        return app

    @property
    @abstractmethod
    def is_draining(self) -> bool: ...

    @abstractmethod
    def pages(self) -> tuple[Hosts, Origins]:
        """The names by which the port may be called, and the origins whose pages may send requests."""

    @abstractmethod
    def ended(self, request: web.Request, status: int, call: HttpCall) -> None:
        """Count a request. `status` is 499 if its client has disconnected."""

    async def admit(
        self, request: web.Request, handler: Handler, call: HttpCall, *, is_from_outside: bool
    ) -> web.StreamResponse:
        """Answer a request that may be answered."""
        return await handler(request)

    def as_api_error(self, error: Exception) -> ApiError:
        """The client's view of an exception."""
        return as_api_error(error)

    def is_open(self, request: web.Request) -> bool:
        """True if no key is needed. By the matched route, not the spelling of its path; and only for
        reading: a path that is open for probes may also accept work.
        """
        return request.method in ("GET", "HEAD") and route_of(request) in self._rules.open_paths

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        call = HttpCall(
            request_id_of(request),
            parent=trace_parent_of(request),
            tells_tokens=TOKENS_HEADER in request.headers,
        )
        CALL.set(call)
        status, size_bytes = CLIENT_GONE, 0
        self.connections.request_begins(request.protocol, body_is_to_come=_body_is_to_come(request))
        try:
            response = await self._guarded(request, handler, call)
            status = call.error_status or response.status
            size_bytes = _size_bytes(response)
            return response
        finally:
            self.connections.request_ends(request.protocol, request.content)
            if self.key_limits is not None and call.key_place:
                self.key_limits.spend(call.key_place, call.prompt_tokens + call.generated_tokens)
            self.ended(request, status, call)
            self._log_access(request, status, size_bytes, call)

    async def _guarded(self, request: web.Request, handler: Handler, call: HttpCall) -> web.StreamResponse:
        try:
            is_from_outside = not (self._rules.trusts_inside and _is_from_inside(request))
            if is_from_outside:
                hosts, origins = self.pages()
                hosts.check(request)
                # Before the key: browsers send preflights without one.
                if (answer := origins.preflight(request)) is not None:
                    origins.stamp(request, answer)
                    return answer
                if self.is_front or request.method not in SAFE_METHODS:
                    origins.check(request)
            if self.keys is not None and not self.is_open(request):
                self.keys.check(request.headers)
            return await self.admit(request, handler, call, is_from_outside=is_from_outside)
        except asyncio.CancelledError:
            raise
        except ConnectionError:
            raise  # the client disconnected while it was written to
        except Exception as error:  # noqa: BLE001 - every error is answered
            failure = call.explain(error, self.as_api_error(error), self._logger)
            return self._rules.error_response(request.path, request.headers, failure, call.request_id)

    async def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every response."""
        response.headers["Server"] = "teneral"  # aiohttp's own would show version numbers
        if self.is_draining:
            # Has a load balancer send the next request elsewhere.
            response.headers["Connection"] = "close"
            response.force_close()
        if not self.is_front:
            self.pages()[1].stamp(request, response)
        call = CALL.get(None)
        if call is not None:
            response.headers["x-request-id"] = call.request_id
            # A front passes its instance's on.
            response.headers.setdefault("openai-processing-ms", str(round(call.age_s() * 1000)))
            if call.tells_tokens and not self.is_front:
                response.headers[TOKENS_HEADER] = call.tokens
            if self.key_limits is not None and call.key_place:
                response.headers.update(self.key_limits.headers(call.key_place))

    def _log_access(self, request: web.Request, status: int, size_bytes: int, call: HttpCall) -> None:
        """Log one line for each request: the path as sent, which has no line breaks, without the query,
        which may contain a secret. Frequent probes are logged for debugging only.
        """
        rules, route = self._rules, route_of(request)
        is_quiet = request.method in ("GET", "HEAD") and (
            route in rules.open_paths or route in rules.quiet_paths
        )
        level = logging.DEBUG if is_quiet else logging.INFO
        if self._access_logger.isEnabledFor(level):
            path = ascii(request.raw_path.partition("?")[0][:MAX_LOGGED_PATH_CHARS])[1:-1]
            self._access_logger.log(
                level,
                "%s %s %d %d bytes %.1f ms %s%s",
                request.method,
                path,
                status,
                size_bytes,
                1000 * call.age_s(),
                call.request_id,
                _work_of(call),
                extra={"fields": _fields_of(request, path, status, size_bytes, call)},
            )


class ServerEdge(Edge):
    """The edge of a server: with the places, deadlines, metrics and spans of its requests."""

    def __init__(
        self, service: Service, keys: ApiKeys | None, hosts: Hosts, origins: Origins, rules: EdgeRules
    ) -> None:
        logger = logging.getLogger("teneral.http")
        super().__init__(service.connections, keys, rules, logger, key_limits=service.key_limits)
        self._service = service
        self._pages = hosts, origins

    @property
    def is_draining(self) -> bool:
        return self._service.in_flight.draining

    def pages(self) -> tuple[Hosts, Origins]:
        return self._pages

    async def admit(
        self, request: web.Request, handler: Handler, call: HttpCall, *, is_from_outside: bool
    ) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        service = self._service
        call.deadline = deadline_of(request, call.arrived_s)
        async with service.in_flight.work() as call.work:
            if call.deadline is not None:
                call.work.limit(call.deadline.remaining_s(), call.deadline.error())
            if route_of(request) not in self._rules.control_paths:
                if self.key_limits is not None and is_from_outside:
                    call.key_place = self.key_limits.admit_request(request.headers)
                service.slot.check()
                if service.state is State.LOADING:
                    service.metrics.cold_request()
                    call.load = service.instance.timeline
            if is_from_outside:
                check_media_type(request, takes_any=self._rules.takes_any_media)
            return await handler(request)

    def ended(self, request: web.Request, status: int, call: HttpCall) -> None:
        service = self._service
        service.metrics.request_ended(route_of(request), status, call.age_s())
        if service.emf is not None and request.method == "POST":
            service.emf.request_ended(
                status,
                call.age_s(),
                prompt_tokens=call.prompt_tokens,
                cached_tokens=call.cached_tokens,
                generated_tokens=call.generated_tokens,
                first_token_s=call.first_token_s,
                is_cold=call.load is not None,
                request_id=call.request_id,
            )
        if service.spans is not None and request.method == "POST" and service.spans.wants(call.parent):
            service.spans.add(_times_of(request, status, call, service.instance.model_name))


def _body_is_to_come(request: web.Request) -> bool:
    """True if more of the request's body is on its way."""
    return request.method == "POST" and request.can_read_body and not request.content.is_eof()


def _size_bytes(response: web.StreamResponse) -> int:
    """The size of the body; of a stream, the bytes sent, with its head and framing."""
    if isinstance(response, web.Response) and isinstance(response.body, bytes):
        return len(response.body)
    return response.body_length if response.prepared else 0


def _work_of(call: HttpCall) -> str:
    """The end of the line: model, tokens, the first token's time and the caller's trace, where there are any."""
    parts = [f" model {call.model}"] if call.model else []
    if call.generated_tokens:
        parts.append(f" {call.prompt_tokens}+{call.generated_tokens} tokens")
    if call.first_token_s is not None:
        parts.append(f" first after {1000 * call.first_token_s:.1f} ms")
    if call.trace_id:
        parts.append(f" trace {call.trace_id}")
    return "".join(parts)


def _fields_of(
    request: web.Request, path: str, status: int, size_bytes: int, call: HttpCall
) -> dict[str, str | int | float]:
    """The line's figures under their names, for logs in JSON."""
    fields: dict[str, str | int | float] = {
        "method": request.method,
        "path": path,
        "status": status,
        "bytes": size_bytes,
        "duration_s": round(call.age_s(), 6),
        "request_id": call.request_id,
    }
    if call.model:
        fields["model"] = call.model
    if call.generated_tokens:
        fields |= {"prompt_tokens": call.prompt_tokens, "generated_tokens": call.generated_tokens}
    if call.first_token_s is not None:
        fields["first_token_s"] = round(call.first_token_s, 6)
    if call.trace_id:
        fields["trace_id"] = call.trace_id
    return fields


def _times_of(request: web.Request, status: int, call: HttpCall, model: str) -> RequestTimes:
    from .spans import RequestTimes  # of servers that export them

    first_token_s = None if call.first_token_s is None else call.arrived_s + call.first_token_s
    return RequestTimes(
        method=request.method,
        route=route_of(request),
        status=status,
        request_id=call.request_id,
        model=model,
        parent=call.parent,
        arrived_s=call.arrived_s,
        ended_s=time.monotonic(),
        first_step_s=call.first_step_s,
        first_token_s=first_token_s,
        prompt_tokens=call.prompt_tokens,
        generated_tokens=call.generated_tokens,
        load=call.load,
    )


def request_id_of(request: web.BaseRequest) -> str:
    """The caller's own id if it is valid, so that logs can be joined; else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def trace_parent_of(request: web.BaseRequest) -> TraceParent | None:
    """The caller's `traceparent` (W3C Trace Context); None without one, or for an invalid one."""
    found = _TRACEPARENT.match(request.headers.get("traceparent", ""))
    if found is None or found["version"] == "ff" or not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    if found["version"] == "00" and found["rest"]:
        return None  # later versions may have more behind it
    from .spans import SAMPLED, TraceParent

    return TraceParent(found["trace"], found["span"], bool(int(found["flags"], 16) & SAMPLED))


def route_of(request: web.Request) -> str:
    """The route's pattern: a client's text must not become a time series."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


def _is_from_inside(request: web.Request) -> bool:
    """True if it came over the local socket of `inside.py`."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX
