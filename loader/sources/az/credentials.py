"""Access tokens for Blob Storage, by an application's secret or workload identity, or else from the
platform's managed identity, and Shared Key signatures, as the page "Authorize with Shared Key" has them.

Token services are asked over connections of our own, so that a container imports nothing for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ...errors import AccessDeniedError, UnavailableError, UsageError
from ..http.address import WebAddress, encode_value, is_loopback, parse_address
from ..http.connections import BodyTooLargeError
from ..http.head import Headers, Request, is_header
from ..http.tokens import MAX_ANSWER_BYTES, Token, ask_service, is_overloaded
from ..http.wire import WireError
from .address import AzSettings, Query

RENEW_S = 300.0  # before a token ends
PAUSE_S = 0.5
APPLICATION_TIMEOUT_S = 10.0
RESOURCE = "https://storage.azure.com/"
IMDS = "http://169.254.169.254"
AUTHORITY = "https://login.microsoftonline.com"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
WAYS_TO_GIVE = (
    "Run under a managed or a workload identity, set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or "
    "AZURE_STORAGE_CONNECTION_STRING, or read a public container with --anonymous."
)
# The fields that are signed, in order, between the method and the fields of Azure's own.
_SIGNED = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip


def ask_token(environment: Mapping[str, str]) -> Token:
    """A new token. Raises `AccessDeniedError`, `UsageError`, and `UnavailableError` for what is
    worth another try.
    """
    if environment.get("AZURE_CLIENT_ID") and environment.get("AZURE_TENANT_ID"):
        if secret := environment.get("AZURE_CLIENT_SECRET"):
            return _by_application(environment, {"client_secret": secret})
        if path := environment.get("AZURE_FEDERATED_TOKEN_FILE"):
            proof = {"client_assertion_type": _ASSERTION, "client_assertion": _read(path)}
            return _by_application(environment, proof)
    return _by_managed_identity(environment)


def _by_managed_identity(environment: Mapping[str, str]) -> Token:
    request = _identity_request(environment)
    hint = "Assign an identity, and set AZURE_CLIENT_ID if there are several."
    service = "the managed identity's service"
    try:
        _, body = ask_service(request, service, hint=hint, pause_s=PAUSE_S, is_busy=_is_busy)
    except (WireError, BodyTooLargeError, OSError) as error:
        message = "there are no credentials for Blob Storage, and no managed identity answers"
        raise AccessDeniedError(f"{message} ({error})", hint=WAYS_TO_GIVE) from error
    return _token_from(body)


def _is_busy(status: int) -> bool:
    """The rule of Azure's page on retries."""
    return status in (404, 410) or is_overloaded(status)


def _identity_request(environment: Mapping[str, str]) -> Request:
    """To the endpoint of App Service and Container Apps where there is one, else to the machine's."""
    client = environment.get("AZURE_CLIENT_ID")
    query = f"resource={encode_value(RESOURCE)}" + (f"&client_id={encode_value(client)}" if client else "")
    endpoint, secret = environment.get("IDENTITY_ENDPOINT"), environment.get("IDENTITY_HEADER")
    if endpoint and secret:
        address = _address(endpoint, "IDENTITY_ENDPOINT", "http")
        if not is_header("X-IDENTITY-HEADER", secret):
            raise UsageError("IDENTITY_HEADER cannot be sent", key="IDENTITY_HEADER")
        target = f"{address.path or '/'}?api-version=2019-08-01&{query}"
        return Request("GET", address.origin, target, (), (("X-IDENTITY-HEADER", secret),))
    host = environment.get("AZURE_POD_IDENTITY_AUTHORITY_HOST") or IMDS
    address = _address(host, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "http")
    target = f"{address.path.rstrip('/')}/metadata/identity/oauth2/token?api-version=2018-02-01&{query}"
    return Request("GET", address.origin, target, (("Metadata", "true"),))


def _by_application(environment: Mapping[str, str], proof: Mapping[str, str]) -> Token:
    """By a registered application's secret, or by a token of an issuer that it trusts."""
    authority = _address(environment.get("AZURE_AUTHORITY_HOST") or AUTHORITY, "AZURE_AUTHORITY_HOST", "")
    if authority.origin.scheme != "https" and not is_loopback(authority.origin):
        raise UsageError("AZURE_AUTHORITY_HOST must be an https address", key="AZURE_AUTHORITY_HOST")
    tenant = encode_value(environment["AZURE_TENANT_ID"])
    form = {
        "grant_type": "client_credentials",
        "client_id": environment["AZURE_CLIENT_ID"],
        **proof,
        "scope": f"{RESOURCE}.default",
    }
    body = "&".join(f"{name}={encode_value(value)}" for name, value in form.items()).encode()
    target = f"{authority.path.rstrip('/')}/{tenant}/oauth2/v2.0/token"
    headers = (("Content-Type", "application/x-www-form-urlencoded"),)
    request = Request("POST", authority.origin, target, (), headers, body)
    hint = "Check AZURE_CLIENT_ID, AZURE_TENANT_ID, and the secret or the federated credential."
    service = "Azure's token service"
    try:
        _, answer = ask_service(request, service, hint=hint, pause_s=PAUSE_S, timeout_s=APPLICATION_TIMEOUT_S)
    except (WireError, BodyTooLargeError, OSError) as error:
        hint = "Check the network, AZURE_AUTHORITY_HOST, HTTPS_PROXY and NO_PROXY."
        raise UnavailableError(f"{service} does not answer: {error}", hint=hint) from error
    return _token_from(answer)


def _token_from(body: bytes) -> Token:
    """Lifetimes are numbers or texts, and the time at which a token ends where there is no
    lifetime.
    """
    import json  # not before the first request is on its way

    try:
        fields: Any = json.loads(body.decode())
        if "expires_in" in fields:
            return Token(fields["access_token"], float(_number(fields["expires_in"])))
        return Token(fields["access_token"], _number(fields["expires_on"]) - time.time())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AccessDeniedError(
            f"the identity's service gives no token: {error}", hint=WAYS_TO_GIVE
        ) from None


def _number(value: object) -> int:
    if type(value) is int and 0 <= value < 1 << 40:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 12:
        return int(value)
    raise ValueError("the answer does not say how long the token is good")


def _address(url: str, key: str, scheme: str) -> WebAddress:
    address = parse_address(url)
    if address is None or address.query or (scheme and address.origin.scheme != scheme):
        raise UsageError(f"{key} is not a usable address", key=key)
    return address


def _read(path: str) -> str:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(MAX_ANSWER_BYTES + 1)
    except OSError as error:
        raise AccessDeniedError(
            f"the identity's token {path} cannot be read: {error.strerror}",
            hint="Check AZURE_FEDERATED_TOKEN_FILE.",
        ) from error
    text = content.decode("ascii", "replace").strip()
    if len(content) > MAX_ANSWER_BYTES or not text.isprintable() or not text:
        raise AccessDeniedError(f"{path} does not hold an identity's token")
    return text


def authorization(
    settings: AzSettings, method: str, path: str, query: Query, headers: Headers, num_bytes: int
) -> str:
    """The Authorization field of a request with a body of `num_bytes`. Raises `ValueError` for a
    malformed key.
    """
    import hmac  # with hashlib and base64: only for keys
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
