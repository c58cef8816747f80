"""Tokens by a credential file, from google-auth: workload identity federation, the login of gcloud, a
service account's key, and impersonation.

The library is an extra, imported here alone: it takes 0.2 s, for which a container whose account the
metadata server knows does not wait. Its requests go over our own client: bounded, and secrets to
https addresses only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import AccessDeniedError, UnavailableError
from ..base import shown_text
from ..http.address import is_loopback, parse_address
from ..http.connections import BodyTooLargeError
from ..http.head import Request, is_header
from ..http.tokens import MAX_ANSWER_BYTES, Token, exchange
from ..http.wire import WireError
from .answers import WAYS_TO_GIVE

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
TIMEOUT_S = 10.0
_SECRETS = ("private_key", "client_secret", "refresh_token")
_AWS_SUBJECT = "urn:ietf:params:aws:token-type:aws4_request"


class _AuthResponse(NamedTuple):
    """A `google.auth.transport.Response`."""

    status: int
    headers: Mapping[str, str]
    data: bytes


def ask_with_file(path: str) -> Token:
    """A new token. Raises `AccessDeniedError`, and `UnavailableError` for what is worth another
    try.
    """
    entries = _read(path)
    try:
        from google.auth import _helpers, exceptions
    except ImportError as error:
        message = f"the credential file {path} needs the package google-auth, which is not installed"
        hint = f"pip install 'teneral[gs]', or choose another way: {WAYS_TO_GIVE}"
        raise AccessDeniedError(message, hint=hint) from error
    try:
        credentials = _credentials(entries, path)
        credentials.refresh(_ask)
        lifetime = credentials.expiry - _helpers.utcnow()
        return Token(credentials.token, lifetime.total_seconds())
    except exceptions.GoogleAuthError as error:
        # What follows the first argument is the service's answer. Not `from error`: it may be secret.
        message = f"no token by the credential file {path}: {shown_text(str(error.args[0]))}"
        if error.retryable:
            raise UnavailableError(message) from None
        raise AccessDeniedError(message, hint=WAYS_TO_GIVE) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the credential file {path} cannot be used: {shown_text(str(error))}"
        raise AccessDeniedError(message, hint=WAYS_TO_GIVE) from None


def _credentials(entries: dict[str, Any], path: str) -> Any:
    for field in _SECRETS:
        if not isinstance(entries.get(field, ""), str):
            raise ValueError(f"{field} is not a text")  # the library would show it
    match entries.get("type"):
        case "service_account":
            from google.oauth2.service_account import Credentials

            return Credentials.from_service_account_info(entries, scopes=[SCOPE])
        case "authorized_user":
            from google.oauth2.credentials import Credentials as UserCredentials

            return UserCredentials.from_authorized_user_info(entries)
        case "external_account" if entries.get("subject_token_type") == _AWS_SUBJECT:
            from google.auth.aws import Credentials as AwsCredentials

            return AwsCredentials.from_info(entries, scopes=[SCOPE])
        case "external_account":
            from google.auth.identity_pool import Credentials as PoolCredentials

            return PoolCredentials.from_info(entries, scopes=[SCOPE])
        case "impersonated_service_account":
            from google.auth.impersonated_credentials import Credentials as Impersonated

            return Impersonated.from_impersonated_service_account_info(entries, scopes=[SCOPE])
        case kind:
            shown = kind if isinstance(kind, str) and len(kind) < 50 and kind.isprintable() else "unknown"
            message = f"{path} holds credentials of the kind {shown!r}, which is not supported"
            raise AccessDeniedError(message, hint=WAYS_TO_GIVE)


def _ask(
    url: str,
    method: str = "GET",
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_: Any,
) -> _AuthResponse:
    """A `google.auth.transport.Request`. Raises `google.auth.exceptions.TransportError`."""
    from google.auth.exceptions import TransportError

    address = parse_address(url)
    fields = tuple((headers or {}).items())
    if address is None or not all(is_header(*pair) for pair in fields):
        raise TransportError("it names an address that cannot be asked")
    if method != "GET" and address.origin.scheme != "https" and not is_loopback(address.origin):
        raise TransportError("it names a token service that is not an https address")
    content = body.encode() if isinstance(body, str) else body or b""
    request = Request(method, address.origin, address.target, (), fields, content)
    try:
        head, data = exchange(request, timeout_s=timeout or TIMEOUT_S)
    except (WireError, BodyTooLargeError) as error:
        raise TransportError(f"{address.origin} does not answer: {error}", retryable=True) from error
    return _AuthResponse(head.status, head.headers, data)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_ANSWER_BYTES + 1)
    except OSError as error:
        raise AccessDeniedError(
            f"the credential file {path} cannot be read: {error.strerror}",
            hint="Check GOOGLE_APPLICATION_CREDENTIALS.",
        ) from error
    if len(content) > MAX_ANSWER_BYTES:
        raise AccessDeniedError(f"the credential file {path} is larger than {MAX_ANSWER_BYTES:,} bytes")
    try:
        entries = json.loads(content.decode())
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise AccessDeniedError(f"the credential file {path} is not a JSON object")
    return entries
