"""A request as the front parses it: its path at the instance, and the parts of its body that the front
reads, which are the model, the sticky key, and the prompt's prefix.

Other values stay bytes, and a body whose model is renamed keeps them unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from ..http.errors import ApiError
from .deployment import Affinity

# Functions have side effects: their requests are never retried.
ACTING_PATHS = frozenset({"/invoke", "/invocations", "/events", "/"})
BODY_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        *("/apply-template", "/completion", "/infill"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/classify", "/classify", "/v1/score", "/score"),
        *("/v1/rerank", "/v2/rerank", "/rerank"),
    }
)
_KSERVE = re.compile(
    r"/v2/models/(?P<name>.+?)(?:/versions/(?P<version>[^/]+))?(?P<verb>/(?:infer|generate|generate_stream|config|stats))?"
)
MAX_KEY_CHARS = 512
# Of a prompt as it stands in the body: the lengths at which beginnings are compared.
PREFIX_BYTES = (256, 1024, 4096)


class _RoutedFields(msgspec.Struct):
    """The fields that the front reads, as bytes; b'' for those that are not there."""

    model: msgspec.Raw = msgspec.Raw()
    teneral: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_READ_DECODER = msgspec.json.Decoder(_RoutedFields)
_WHOLE_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Teneral(msgspec.Struct):
    session: str | None = None


@dataclass(slots=True)
class Body:
    """A request's JSON object, of which only `fields` are taken apart: a million others cost nothing."""

    data: bytes
    fields: _RoutedFields
    model: str | None  # without the adapter
    session: str | None  # the sticky key that the body gives
    adapter: str = ""  # of `model: "base:name"`, with its colon: the instance knows it, and the pool does not

    @classmethod
    def parse(cls, data: bytes) -> Body:
        """Parse a body. Raises `ApiError` with 400 if it is not a JSON object, or its model is not
        a text.
        """
        try:
            fields = _READ_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not a JSON object: {str(error)[:200]}") from None
        model = _text(fields.model, "model")
        session = None
        if fields.teneral:
            try:
                session = msgspec.json.decode(fields.teneral, type=_Teneral).session
            except (msgspec.DecodeError, RecursionError):
                session = None  # the instance says what is wrong with it
        for name in ("session_id", "conversation", "prompt_cache_key", "user"):
            if session is None:
                # The instance says what is wrong with another value.
                with contextlib.suppress(ApiError):
                    session = _text(getattr(fields, name), name)
        name, colon, adapter = (model or "").partition(":")
        return cls(data, fields, name or model, session[:MAX_KEY_CHARS] if session else None, colon + adapter)

    def named(self, model: str) -> bytes:
        """The body with this model in place of the one that it names; the adapter stays."""
        if self.model is None or self.model == model:
            return self.data
        fields: dict[str, Any] = {**_WHOLE_DECODER.decode(self.data), "model": model + self.adapter}
        return msgspec.json.encode(fields)

    def prefixes(self) -> list[bytes]:
        """Digests of the prompt's beginning, longest first."""
        prompt = bytes(self.fields.messages or self.fields.prompt)
        lengths = [length for length in PREFIX_BYTES if length <= len(prompt)]
        return [hashlib.blake2b(prompt[:length], digest_size=8).digest() for length in reversed(lengths)]


class ProxyRequest(NamedTuple):
    """A request as parsed by the front."""

    name: str  # as written by the client; '' without one
    session: str | None
    affinities: tuple[Affinity, ...]
    path: str  # at the instance; {model} stands for the model's own name
    data: bytes
    is_repeatable: bool
    body: Body | None = None
    is_kserve: bool = False

    def body_for(self, model: str) -> bytes:
        """The body with the instance's own name of the model."""
        return self.data if self.body is None else self.body.named(model)


def parse_request(request: web.Request, data: bytes) -> ProxyRequest:
    """Parse a request. Raises `ApiError` for an unreadable body."""
    path = request.path
    session = (request.headers.get("x-session-id") or "")[:MAX_KEY_CHARS] or None
    named = request.headers.get("x-teneral-model", "")
    raw_path = request.rel_url.raw_path_qs
    if path in BODY_PATHS:
        body = Body.parse(data)
        session = body.session if body.fields.teneral and body.session else session or body.session
        affinities: tuple[Affinity, ...] = (session,) if session else tuple(body.prefixes())
        name = body.model or named
        return ProxyRequest(name, session, affinities, raw_path, data, True, body=body)
    if found := _KSERVE.fullmatch(path):
        version = found["version"]
        name = f"{found['name']}@{version}" if version else found["name"]
        own = f"/v2/models/{{model}}{found['verb'] or ''}"
        return ProxyRequest(name, session, (session,) if session else (), own, data, True, is_kserve=True)
    affinities = (session,) if session else ()
    return ProxyRequest(named, session, affinities, raw_path, data, path not in ACTING_PATHS)


def _text(value: msgspec.Raw, name: str) -> str | None:
    if not value:
        return None
    try:
        return msgspec.json.decode(value, type=str | None)
    except msgspec.DecodeError:
        raise ApiError(400, f"{name} must be a text", param=name) from None
