"""Shared Key signatures of Azure Storage, as its page "Authorize with Shared Key" has them. Pure."""

from __future__ import annotations

from ..http.head import Headers
from .address import Query, Settings

# The fields that are signed, in order, between the method and the fields of Azure's own.
_SIGNED = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip


def authorization(
    settings: Settings, method: str, path: str, query: Query, headers: Headers, num_bytes: int
) -> str:
    """The Authorization field of a request with a body of `num_bytes`. Raises `ValueError` for a
    malformed key.
    """
    import hmac  # with hashlib and base64: for those who have a key
    from base64 import b64decode, b64encode

    fields = {name.lower(): value for name, value in headers}
    fields["content-length"] = str(num_bytes) if num_bytes else ""
    own = "".join(f"{name}:{fields[name]}\n" for name in sorted(fields) if name.startswith("x-ms-"))
    resource = f"/{settings.account}{path}" + "".join(
        f"\n{name}:{value}" for name, value in sorted((name.lower(), value) for name, value in query)
    )
    lines = (method, *(fields.get(name, "") for name in _SIGNED))
    text = "\n".join(lines) + "\n" + own + resource
    digest = hmac.digest(b64decode(settings.key, validate=True), text.encode(), "sha256")
    return f"SharedKey {settings.account}:{b64encode(digest).decode()}"
