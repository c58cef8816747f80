"""SageMaker real-time endpoints: POST /invocations. The rest of the contract is elsewhere: /ping in
`http/application.py`, the port and 30 s from SIGTERM to SIGKILL in the platform's row, the model's
folder in `settings.py`.

With a user's function, the body is its event, of the type in `Content-Type`, and its result has the
type in `Accept`. Without one, the body is one of OpenAI's API, identified by its keys. Sessions
that SageMaker routes to one instance are sessions of the KV pool.

Sources: "Custom inference code with hosting services"; `InvokeEndpoint` and its shapes in the
service's API model.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ...runtime.errors import RequestError
from ..http.errors import ApiError
from ..http.invoke import invoking, respond, stream_values, whole
from ..http.json_bodies import JsonDecoder, check_shape, encode
from ..http.sse import NDJSON, SSE, Framing
from ..openai.chat import ChatRoute
from ..openai.completions import CompletionRoute
from ..openai.embeddings import EmbeddingRoute

if TYPE_CHECKING:
    from ..function.handler import Handler
    from ..http.service import Service

NAME = "sagemaker"  # of the platform
SESSION_HEADER = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_HEADER = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_HEADER = "X-Amzn-SageMaker-Closed-Session-Id"
# Headers of a request that a function finds in `context.platform`, unchanged.
FACT_HEADERS = {
    "custom_attributes": "X-Amzn-SageMaker-Custom-Attributes",
    "inference_id": "X-Amzn-SageMaker-Inference-Id",
}
NEW_SESSION = "NEW_SESSION"  # sent instead of a session id
MAX_SESSION_ID_CHARS = 256
_SESSION_ID = re.compile(r"[A-Za-z0-9](?:-*[A-Za-z0-9])*")
# Bodies that only begin or end a session, accepted by other containers for SageMaker too.
_SESSION_ACTIONS = {
    b'{"requestType":"NEW_SESSION"}': "begin",
    b'{"requestType":"CLOSE"}': "close",
}
MAX_SESSION_ACTION_BYTES = 64
MAX_LINES = 1 << 16  # of JSON, each an event's item: the server answers nothing else while it reads them

JSON_TYPES = ("", "application/json")
LINES_TYPES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl", NDJSON.content_type)


class SageMakerRoute:
    """POST /invocations.

    InvokeEndpoint reads the whole answer, InvokeEndpointWithResponseStream streams it: the
    container gets the same request.
    """

    def __init__(self, service: Service, handler: Handler | None) -> None:
        self._service = service
        self._handler = handler
        self._any: JsonDecoder[Any] = JsonDecoder(Any)
        self._top_level: JsonDecoder[dict[str, msgspec.Raw]] = JsonDecoder(dict[str, msgspec.Raw])
        self._routes: dict[str, Callable[[web.Request, bytes | bytearray], Awaitable[web.StreamResponse]]] = {
            "messages": ChatRoute(service).answer,
            "prompt": CompletionRoute(service).answer,
            "input": EmbeddingRoute(service).answer,
        }

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            given = request.headers.get(SESSION_HEADER)
            action = _session_action(data)
            if action == "close":
                return _closed(given)
            begins = given == NEW_SESSION or action == "begin"
            session = secrets.token_hex(16) if begins else _checked_session(given)
            if action == "begin":
                response: web.StreamResponse = web.Response(body=b"{}", content_type="application/json")
            elif self._handler is not None:
                response = await self._invoke(request, self._handler, data, session)
            else:
                response = await self._dispatch(request, data, session)
        # A stream has been sent; SageMaker begins no session with one.
        if begins and not response.prepared:
            response.headers[NEW_SESSION_HEADER] = f"{session}; Expires={self._expiry()}"
        return response

    def _expiry(self) -> str:
        """The expiry of an unused session, in SageMaker's format."""
        at_s = time.time() + self._service.instance.config.session_idle_s
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))

    # with the user's function

    async def _invoke(
        self, request: web.Request, handler: Handler, data: bytearray, session: str | None
    ) -> web.StreamResponse:
        event = self._event(request, data)
        facts = {"name": NAME} | {
            fact: request.headers[name] for fact, name in FACT_HEADERS.items() if name in request.headers
        }
        async with invoking(self._service, handler, event, session=session, platform=facts) as values:
            accepted = accepted_types(request.headers.get("Accept", ""))
            lines = next((media for media in accepted if media in LINES_TYPES), None)
            if SSE.content_type in accepted:
                return await stream_values(self._service, request, SSE, [], values)
            if lines is not None:
                framing = Framing(lines, NDJSON.prefix, NDJSON.suffix, NDJSON.has_comments, NDJSON.end)
                return await stream_values(self._service, request, framing, [], values)
            if accepted and "*/*" not in accepted:
                return await _in_one(handler, values, accepted)
            return await respond(self._service, request, handler, values)

    def _event(self, request: web.Request, data: bytearray) -> Any:
        """The event: parsed JSON, JSON lines as a list, text as a string, anything else as bytes."""
        media, charset = media_type(request.headers.get("Content-Type", ""))
        if media in JSON_TYPES or media.endswith("+json"):
            return self._any.decode(data) if data else None
        if media in LINES_TYPES:
            if data.count(b"\n") + data.count(b"\r") > MAX_LINES:
                raise RequestError(
                    f"the body has more than {MAX_LINES} lines", hint="Send it in several requests."
                )
            check_shape(data)  # the values of all lines together
            return [self._any.decode(line) for line in bytes(data).splitlines() if line.strip()]
        if not media.startswith("text/"):
            return bytes(data)
        if charset not in ("", "utf-8", "us-ascii"):
            raise ApiError(415, f"texts must be UTF-8, not {charset[:50]!r}", code="unsupported_encoding")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None

    # without one

    async def _dispatch(
        self, request: web.Request, data: bytearray, session: str | None
    ) -> web.StreamResponse:
        body = self._top_level.decode(data)
        kinds = [key for key in self._routes if key in body]
        if len(kinds) != 1:
            raise RequestError(
                "the body must have one of messages, prompt and input",
                hint="messages are answered as /v1/chat/completions does, a prompt as /v1/completions, an input as "
                "/v1/embeddings.",
            )
        if session is None or kinds[0] == "input":  # embeddings have no state for a session
            return await self._routes[kinds[0]](request, data)
        return await self._routes[kinds[0]](request, self._with_session(body, session))

    def _with_session(self, body: dict[str, msgspec.Raw], session: str) -> bytes:
        """The body with SageMaker's session, unless it names one itself."""
        extras = self._any.decode(bytes(body["teneral"])) if "teneral" in body else None
        if extras is None:
            extras = {}
        if isinstance(extras, dict):  # the route refuses anything else
            body["teneral"] = msgspec.Raw(msgspec.json.encode({"session": session, **extras}))
        return msgspec.json.encode(body)


def accepted_types(accept: str) -> tuple[str, ...]:
    """The media types of an `Accept` header, in order: weights are for caches, not for models."""
    return tuple(
        media for part in accept[:1024].split(",") if (media := part.partition(";")[0].strip().lower())
    )


def media_type(content_type: str) -> tuple[str, str]:
    """The media type and the charset of a `Content-Type`, lower-case; '' if missing."""
    media, _, rest = content_type.partition(";")
    charset = re.search(r"charset=\"?([^\s;\"]*)", rest, re.IGNORECASE)
    return media.strip().lower(), charset[1].lower() if charset else ""


async def _in_one(handler: Handler, values: AsyncIterator[Any], accepted: tuple[str, ...]) -> web.Response:
    """A whole answer of an accepted type: several values become a JSON list."""
    every = [value async for value in values]
    value = every[0] if len(every) == 1 and not handler.kind.is_generator else every
    wanted = next((media for media in accepted if "*" not in media), "")
    if isinstance(value, bytes):
        return web.Response(body=value, content_type=wanted or "application/octet-stream")
    if isinstance(value, str) and wanted.startswith("text/"):
        return web.Response(text=value, content_type=wanted)
    return whole(value)


def _session_action(data: bytearray) -> str | None:
    if len(data) > MAX_SESSION_ACTION_BYTES:
        return None
    return _SESSION_ACTIONS.get(bytes(data).translate(None, b" \t\r\n"))


def _checked_session(given: str | None) -> str | None:
    if given is None or (len(given) <= MAX_SESSION_ID_CHARS and _SESSION_ID.fullmatch(given)):
        return given
    raise RequestError(
        "a session's id has letters, digits and hyphens between them, 256 at most", param=SESSION_HEADER
    )


def _closed(given: str | None) -> web.Response:
    """Close a session. Its pins are released after its idle time, or when memory is needed."""
    session = _checked_session(given)
    if session is None or session == NEW_SESSION:
        raise RequestError(f"to close a session, name it in {SESSION_HEADER}", param=SESSION_HEADER)
    return web.Response(
        body=encode({}), content_type="application/json", headers={CLOSED_SESSION_HEADER: session}
    )
