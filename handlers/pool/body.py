"""The parts of a request's body that the front reads: the model, the sticky key, and the prompt's
prefix.

Other values stay bytes, and a body whose model is renamed keeps them unchanged.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from ..http.errors import ApiError

MAX_KEY_CHARS = 512
PREFIX_BYTES = (
    256,
    1024,
    4096,
)  # of a prompt as it stands in the body: the lengths at which beginnings are compared
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Teneral(msgspec.Struct):
    session: str | None = None


@dataclass(slots=True)
class Body:
    """A request's JSON object. `fields` are its values, as bytes."""

    data: bytes
    fields: dict[str, msgspec.Raw]
    model: str | None
    session: str | None  # the sticky key that the body gives

    @classmethod
    def parse(cls, data: bytes) -> Body:
        """Parse a body. Raises `ApiError` with 400 if it is not a JSON object, or its model is not
        a text.
        """
        try:
            fields = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not a JSON object: {str(error)[:200]}") from None
        model = _text(fields, "model")
        session = None
        if "teneral" in fields:
            try:
                session = msgspec.json.decode(fields["teneral"], type=_Teneral).session
            except (msgspec.DecodeError, RecursionError):
                session = None  # the instance says what is wrong with it
        if session is None and "user" in fields:
            try:
                session = _text(fields, "user")
            except ApiError:
                session = None
        return cls(data, fields, model, session[:MAX_KEY_CHARS] if session else None)

    def named(self, model: str) -> bytes:
        """The body with this model in place of the one that it names."""
        if self.model is None or self.model == model:
            return self.data
        fields: dict[str, Any] = {**self.fields, "model": model}
        return msgspec.json.encode(fields)

    def prefixes(self) -> list[bytes]:
        """Digests of the prompt's beginning, longest first."""
        prompt = bytes(self.fields.get("messages") or self.fields.get("prompt") or b"")
        lengths = [length for length in PREFIX_BYTES if length <= len(prompt)]
        return [hashlib.blake2b(prompt[:length], digest_size=8).digest() for length in reversed(lengths)]


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=str | None)
    except msgspec.DecodeError:
        raise ApiError(400, f"{name} must be a text", param=name) from None
