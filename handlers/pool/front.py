"""The pool's one port: finds the requested model, asks the supervisor for an instance, and connects
the two.

It reads the model and the sticky key from bodies; answers are passed through as they arrive. If a
client disconnects, its request at the instance is cancelled. If an instance ends before the first
byte of its answer, the request is retried once, elsewhere; if it ends later, the stream ends with
an error event.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ...loader.errors import InsufficientMemoryError
from ..api_document.routes import server_routes
from ..console.files import PATHS as CONSOLE_PATHS
from ..http.admission import Bodies
from ..http.errors import SERVER_ERROR, ApiError, as_api_error, retry_after
from ..http.key_limits import KeyLimits
from ..http.keys import ApiKeys
from ..http.limits import OWN_HEADERS, PIECE_BYTES
from ..http.service import CALL, TOKENS_HEADER, HttpCall
from .attempts import LostError, Verdict, ask_instances
from .deployment import Deployment, FailingError, Lease
from .protocols import StreamEnd, read_tokens
from .proxy_request import ProxyRequest, parse_request
from .routing import Chooser
from .shadow import Seen, Shadows
from .supervisor import Supervisor
from .versions import ModelState

# An answer of a known length up to this is read completely before its first byte is sent.
MAX_WHOLE_BYTES = 1 << 20
UPSTREAM_KEEPALIVE_S = 60.0
# Of a header in an answer: a CloudEvent's attributes have 64 KiB, and take three times that as a header.
MAX_ANSWER_FIELD_BYTES = 256 << 10
# Beyond the model's own limit, for its instance to report the time-out.
UPSTREAM_GRACE_S = 10.0
DRAINED_RETRY_AFTER_S = 60  # the model is back only once a client wakes it
_PARAMETER = re.compile(r"{(\w+)}")
# Bodies are passed on as they were decompressed.
_OWN_HEADERS = OWN_HEADERS | {"content-encoding"}


class Front:
    """The routes of models' requests. One per pool."""

    def __init__(
        self,
        supervisor: Supervisor,
        bodies: Bodies,
        keys: ApiKeys | None,
        key_limits: KeyLimits | None = None,
    ) -> None:
        """`keys` grant access to all models without a key of their own, within `key_limits`."""
        self._supervisor = supervisor
        self._bodies = bodies
        self._keys = keys
        self._key_limits = key_limits
        self._chooser = Chooser()
        self._shadows = Shadows(supervisor)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        await self._shadows.close()
        if self._session is not None:
            await self._session.close()

    def routes(self) -> Iterator[web.RouteDef]:
        """An instance's routes. Other paths are 404 without an instance: neither a scanner nor a router that
        tries vLLM's own routes wakes a model.
        """
        for route in server_routes():
            if route.method == "GET" and route.path in CONSOLE_PATHS:
                continue
            path = _PARAMETER.sub(r"{\1:.+}", route.canonical)
            if route.method == "GET":
                yield web.get(path, self.work)  # and HEAD
            else:
                yield web.route(route.method, path, self.work)

    async def work(self, request: web.Request) -> web.StreamResponse:
        """Any request for a model. Checks its key, which depends on the model."""
        call = CALL.get()
        call.model = "unknown"
        if request.method != "POST":
            return await self._work(request, b"", call)
        async with self._bodies.read(request) as data:
            return await self._work(request, bytes(data), call)

    async def _work(self, request: web.Request, data: bytes, call: HttpCall) -> web.StreamResponse:
        parsed = parse_request(request, data)
        state, deployment, version = self._find(request, parsed)
        call.model = state.model.name
        return await self._answer(request, parsed, deployment, version, call)

    def _find(self, request: web.Request, parsed: ProxyRequest) -> tuple[ModelState, Deployment, int | None]:
        """The model and version for a request, and the version that it names. Raises `ApiError`."""
        supervisor = self._supervisor
        if supervisor.draining:
            raise ApiError(
                503, "the pool is shutting down", kind=SERVER_ERROR, code="draining", headers=retry_after(1)
            )
        name = parsed.name
        if not name:
            if len(supervisor.models) != 1:
                self._check_key(request, None)
                raise ApiError(
                    400,
                    "the request names no model: put its name into the field model, or the header x-teneral-model",
                    param="model",
                )
            name = next(iter(supervisor.models))
        target = self._chooser.target(supervisor.pool, name, parsed.session)
        state = None if target is None else supervisor.models.get(target.model)
        self._check_key(request, state)
        if target is None or state is None:
            raise _not_found(name)
        if state.paused:
            raise ApiError(
                503,
                f"the model {name!r} is drained until it is woken",
                kind=SERVER_ERROR,
                code="model_unloaded",
                headers=retry_after(DRAINED_RETRY_AFTER_S),
            )
        deployment = state.choose(target.version, parsed.session, self._chooser)
        if deployment is None:
            if state.trouble and target.version is None:
                raise ApiError(
                    503, f"the model {name!r} cannot be served: {state.trouble}", kind=SERVER_ERROR,
                    code="model_unavailable", headers=retry_after(5),
                )  # fmt: skip
            raise _not_found(name)
        if deployment.keys is not None:  # before an instance is started
            deployment.keys.check(request.headers)
        return state, deployment, target.version

    def _check_key(self, request: web.Request, state: ModelState | None) -> None:
        """Check the pool's key, except for models with a key of their own, which their instances
        check.
        """
        if self._keys is None or (state is not None and "api_key" in state.model.secrets):
            return
        self._keys.check(request.headers)
        if self._key_limits is not None:
            CALL.get().key_place = self._key_limits.admit_request(request.headers)

    # answering

    async def _answer(
        self,
        request: web.Request,
        parsed: ProxyRequest,
        deployment: Deployment,
        version: int | None,
        call: HttpCall,
    ) -> web.StreamResponse:
        # Twice: where a version cannot be started, another one takes the request.
        limit_s = 2 * deployment.model.queue_timeout_s + deployment.model.request_timeout_s + UPSTREAM_GRACE_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await ask_instances(
                    self._supervisor,
                    self._chooser,
                    deployment,
                    version,
                    lambda lease, verdict: self._proxy_once(request, parsed, lease, verdict, call, limit),
                    affinities=parsed.affinities,
                    is_repeatable=parsed.is_repeatable,
                )
        except TimeoutError:
            raise _took_too_long() from None
        except LostError:
            raise ApiError(
                502,
                "the instance ended before it answered",
                kind=SERVER_ERROR,
                code="instance_lost",
                headers=retry_after(1),
            ) from None

    async def _proxy_once(
        self,
        request: web.Request,
        parsed: ProxyRequest,
        lease: Lease,
        verdict: Verdict,
        call: HttpCall,
        limit: asyncio.Timeout,
    ) -> web.StreamResponse:
        """Send the request to the instance, and pass its answer through. Raises `LostError` if
        nothing was sent to the client yet. At the time `limit`, a stream ends with an error.
        """
        deployment = lease.server.deployment
        name = deployment.model.name
        path = parsed.path.replace("{model}", quote(name)) if parsed.is_kserve else parsed.path
        body, headers = parsed.body_for(name), _forwarded(request, call)
        url = URL(f"{lease.server.process.url}{path}", encoded=True)
        began_s = time.monotonic()
        try:
            async with await self._send(request.method, url, body, headers, verdict) as answer:
                verdict.is_error = answer.status >= 500 and answer.status != 503
                whole = await _read_whole(answer, verdict)
                reply_headers = _passed_on(answer.headers)
                read_tokens(reply_headers.pop(TOKENS_HEADER, ""), call)
                reply_headers["x-teneral-model"] = deployment.name
                reply_headers["x-teneral-start"] = lease.start
                seen = Seen(answer.status, whole, time.monotonic() - began_s)
                self._shadows.copy(path, body, deployment, headers, seen)
                if whole is not None:
                    return web.Response(status=answer.status, headers=reply_headers, body=whole)
                response = web.StreamResponse(status=answer.status, headers=reply_headers)
                await response.prepare(request)
                end_s = limit.when()
                assert end_s is not None
                limit.reschedule(None)  # no other answer can follow what was sent
                end = StreamEnd(request.path, call.request_id, call if call.key_place else None)
                await _stream(answer, response, end, end_s, verdict)
                return response
        except asyncio.CancelledError:
            verdict.is_late |= limit.expired()
            # Unknown where the client leaves before an answer: estimated from the body, at four bytes a token.
            call.prompt_tokens = call.prompt_tokens or len(body) // 4
            raise
        finally:
            if verdict.is_late and time.monotonic() - began_s > deployment.model.request_timeout_s:
                verdict.is_error = verdict.is_hung = True

    async def _send(
        self, method: str, url: URL, body: bytes, headers: CIMultiDict[str], verdict: Verdict
    ) -> aiohttp.ClientResponse:
        """Send a request to an instance. Raises `LostError` if no answer begins."""
        try:
            return await self._client().request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, ConnectionError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise _out_of_files() from error
            verdict.is_error = True
            raise LostError from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                max_field_size=MAX_ANSWER_FIELD_BYTES,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _out_of_files() -> ApiError:
    return ApiError(
        503,
        "the pool has no files left for more connections",
        kind=SERVER_ERROR,
        code="too_many_connections",
        headers=retry_after(1),
    )


def _took_too_long() -> ApiError:
    return ApiError(504, "the instance did not answer in time", kind=SERVER_ERROR, code="request_timeout")


async def _read_whole(answer: aiohttp.ClientResponse, verdict: Verdict) -> bytes | None:
    """The whole body of a short answer; None if it is to be streamed. Raises `LostError`."""
    if answer.content_length is None or answer.content_length > MAX_WHOLE_BYTES:
        return None
    try:
        return await answer.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        verdict.is_error = True
        raise LostError from error


async def _stream(
    answer: aiohttp.ClientResponse,
    response: web.StreamResponse,
    end: StreamEnd,
    end_s: float,
    verdict: Verdict,
) -> None:
    """Pass a body through to its end. A failure is the last event of a stream of events; of any other body, it closes
    the connection: raises `ConnectionResetError`.
    """
    failure = await _copy_body(answer, response, end, end_s)
    if failure is not None:
        verdict.is_error, verdict.is_late = True, failure.status == 504
        if answer.content_type != "text/event-stream":
            raise ConnectionResetError(failure.message)
        await response.write(end.event(failure))
    await response.write_eof()


async def _copy_body(
    answer: aiohttp.ClientResponse, response: web.StreamResponse, end: StreamEnd, end_s: float
) -> ApiError | None:
    """Pass an answer's body through as it arrives. Returns the error if the instance ended in the
    middle, or sends nothing more after the time `end_s`.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            # A slow client may have taken all of the time.
            async with asyncio.timeout_at(max(end_s, loop.time() + UPSTREAM_GRACE_S)):
                piece = await answer.content.readany()
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            return ApiError(
                502, "the instance ended while it answered", kind=SERVER_ERROR, code="instance_lost"
            )
        except TimeoutError:
            return _took_too_long()
        if not piece:
            return None
        for begin in range(0, len(piece), PIECE_BYTES):
            await response.write(piece[begin : begin + PIECE_BYTES])
        end.passed(piece)


def _forwarded(request: web.Request, call: HttpCall) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in request.headers.get("Connection", "").split(",")}
    headers = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() not in _OWN_HEADERS and name.lower() not in named
    )
    headers["x-request-id"] = call.request_id
    headers.popall(TOKENS_HEADER, None)
    if call.key_place:
        headers[TOKENS_HEADER] = "1"
    return headers


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OWN_HEADERS)


def _not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"the model {name[:200]!r} does not exist here; GET /v1/models lists those that do",
        param="model",
        code="model_not_found",
    )


def as_pool_error(error: Exception) -> ApiError:
    """The pool's own errors as HTTP; all others as in every server."""
    if isinstance(error, FailingError):
        return ApiError(
            503,
            error.message,
            kind=SERVER_ERROR,
            code="model_unavailable",
            headers=retry_after(error.retry_after_s),
        )
    if isinstance(error, InsufficientMemoryError):
        return ApiError(507, error.message, kind=SERVER_ERROR, code="insufficient_memory")
    failure = as_api_error(error)
    if (
        failure is not error and failure.status == 429
    ):  # the pool's queue: another try elsewhere, or later, is of use
        return ApiError(503, failure.message, kind=SERVER_ERROR, code="no_instance", headers=failure.headers)
    return failure
