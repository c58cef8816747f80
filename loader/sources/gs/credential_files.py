"""Tokens by a credential file: workload identity federation, the login of gcloud, or a service
account's key.

The file and all answers are outside input: bounded, and checked field by field. The formats are
those of https://google.aip.dev/auth/4117 (external accounts), /4113 (a user's login) and /4112 (a
service account's key, whose assertion is a JWT by RFC 7523, signed with RS256).
"""

from __future__ import annotations

import base64
import json
import time
from typing import Any
from urllib.parse import urlencode

from ...errors import AccessDeniedError, UnavailableError
from ..base import MAX_SHOWN_CHARS, SourceOptions, shown_text
from ..http.address import WebAddress, parse_address
from ..http.head import Request, is_header
from ..http.send import Reply, Sender
from ..http.source import RETRYABLE
from ..http.tokens import MAX_ANSWER_BYTES, Token
from .address import is_loopback
from .answers import WAYS_TO_GIVE

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_IMPERSONATOR_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_LOGIN_URL = "https://oauth2.googleapis.com/token"
_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - the name of a kind
_FORM = ("Content-Type", "application/x-www-form-urlencoded")
_JSON = ("Content-Type", "application/json")
LIFETIME_S = 3600
MAX_HEADERS = 16

Document = dict[str, Any]


def ask_with_file(path: str) -> Token:
    """A new token. Raises `AccessDeniedError`, and `UnavailableError` for what is worth another
    try.
    """
    entries = _document(_read(path), f"the credential file {path}")
    sender = Sender("Google's token service", SourceOptions(max_attempts=3, read_timeout_s=10.0))
    try:
        match entries.get("type"):
            case "external_account":
                return _federated(sender, entries, path)
            case "authorized_user":
                return _logged_in(sender, entries)
            case "service_account":
                return _signed(sender, entries)
            case kind:
                raise _unsupported(kind, path)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise AccessDeniedError(
            f"no token by the credential file {path}: {_reason(error)}", hint=WAYS_TO_GIVE
        ) from None


def _unsupported(kind: object, path: str) -> AccessDeniedError:
    shown = kind if isinstance(kind, str) and len(kind) < 50 and kind.isprintable() else "unknown"
    return AccessDeniedError(f"{path} holds credentials of the kind {shown!r}, which is not supported")


def _logged_in(sender: Sender, entries: Document) -> Token:
    form = {
        "grant_type": "refresh_token",
        **{field: _text(entries, field) for field in ("client_id", "client_secret", "refresh_token")},
    }
    answer = _post_form(sender, entries.get("token_uri") or _LOGIN_URL, form)
    return Token(answer["access_token"], answer["expires_in"])


def _signed(sender: Sender, entries: Document) -> Token:
    """The token for an assertion that the account's key signs, valid for an hour."""
    url = entries.get("token_uri") or _LOGIN_URL
    _secure(url)  # before anything is signed for it
    now_s = int(time.time())
    header = {"alg": "RS256", "typ": "JWT", "kid": _text(entries, "private_key_id")}
    claims = {"iss": _text(entries, "client_email"), "scope": SCOPE, "aud": url}
    lifetime = {"iat": now_s, "exp": now_s + LIFETIME_S}
    content = f"{_base64url(_json(header))}.{_base64url(_json({**claims, **lifetime}))}"
    signature = _rs256(_text(entries, "private_key"), content.encode())
    assertion = f"{content}.{_base64url(signature)}"
    answer = _post_form(sender, url, {"grant_type": _BEARER, "assertion": assertion})
    return Token(answer["access_token"], answer["expires_in"])


def _json(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _rs256(private_key: str, content: bytes) -> bytes:
    """RSASSA-PKCS1-v1_5 with SHA-256. `private_key` is PEM."""
    try:  # an extra: other kinds of credentials need no signature
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        message = "a service account's key needs the package cryptography, which is not installed"
        hint = f"pip install 'teneral[gs-keys]', or choose another way: {WAYS_TO_GIVE}"
        raise AccessDeniedError(message, hint=hint) from error
    try:
        key = load_pem_private_key(private_key.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, RSAPrivateKey):
        raise ValueError("private_key is not an RSA key in PEM without a password")
    return key.sign(content, PKCS1v15(), SHA256())


def _federated(sender: Sender, entries: Document, path: str) -> Token:
    impersonates = entries.get("service_account_impersonation_url")
    form = {
        "grant_type": _EXCHANGE,
        "audience": _text(entries, "audience"),
        "scope": _IMPERSONATOR_SCOPE if impersonates else SCOPE,
        "requested_token_type": _ACCESS_TOKEN,
        "subject_token_type": _text(entries, "subject_token_type"),
        "subject_token": _subject_token(sender, entries.get("credential_source"), path),
    }
    answer = _post_form(sender, _text(entries, "token_url"), form)
    token = Token(answer["access_token"], answer.get("expires_in", LIFETIME_S))
    return _impersonated(sender, impersonates, token) if impersonates else token


def _impersonated(sender: Sender, url: object, token: Token) -> Token:
    body = json.dumps({"scope": [SCOPE], "lifetime": f"{LIFETIME_S}s"}).encode()
    headers = (_JSON, ("Authorization", f"Bearer {token.text}"))
    answer = _answer(sender, "POST", _secure(url), headers, body)
    import datetime

    ends = datetime.datetime.fromisoformat(_text(answer, "expireTime"))
    lifetime = ends - datetime.datetime.now(datetime.UTC)
    return Token(answer["accessToken"], lifetime.total_seconds())


def _subject_token(sender: Sender, source: object, path: str) -> str:
    """The identity that another issuer attests: the content of a file, or the answer to a GET."""
    if not isinstance(source, dict) or "environment_id" in source or "executable" in source:
        raise _unsupported("external_account of AWS or an executable", path)
    if "file" in source:
        content = _read(_text(source, "file"))
    else:
        address = parse_address(_text(source, "url"))
        given = source.get("headers") or {}
        headers = tuple(given.items())
        if address is None or len(headers) > MAX_HEADERS or not all(is_header(*pair) for pair in headers):
            raise ValueError("its credential_source cannot be asked")
        request = Request("GET", address.origin, address.target, (), headers)
        content = _checked(sender.until_answered("", lambda: request))
    form = source.get("format") or {}
    if form.get("type", "text") == "json":
        entries = _document(content, "the credential_source")
        return _text(entries, _text(form, "subject_token_field_name"))
    text = content.decode().strip()
    if not text:
        raise ValueError("its credential_source gives no token")
    return text


def _post_form(sender: Sender, url: object, form: dict[str, str]) -> Document:
    return _answer(sender, "POST", _secure(url), (_FORM,), urlencode(form).encode())


def _answer(
    sender: Sender, method: str, address: WebAddress, headers: tuple[tuple[str, str], ...], body: bytes
) -> Document:
    request = Request(method, address.origin, address.target, (), headers)
    reply = sender.until_answered("", lambda: request, body)
    return _document(_checked(reply), str(address.origin))


def _checked(reply: Reply) -> bytes:
    """The body of a good answer. Raises for all others, with what the server says of the reason."""
    status = reply.head.status
    if status == 200 and len(reply.body) <= MAX_ANSWER_BYTES:
        return reply.body
    if status in RETRYABLE:
        raise UnavailableError(f"the token service answers {status}", retry_after_s=reply.head.retry_after_s)
    reason = ""
    try:
        problem = json.loads(reply.body.decode())
        reason = shown_text(str(problem.get("error_description") or problem.get("error", "")))
    except (ValueError, AttributeError, RecursionError):
        pass
    shown = f" ({reason})" if reason else ""
    raise AccessDeniedError(f"the token service answers {status}{shown}", hint=WAYS_TO_GIVE)


def _secure(url: object) -> WebAddress:
    """An address to which secrets may be sent."""
    address = parse_address(url) if isinstance(url, str) else None
    if address is None or (address.origin.scheme != "https" and not is_loopback(address.origin)):
        raise ValueError("it names a token service that is not an https address")
    return address


def _read(path: str) -> bytes:
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
    return content


def _document(content: bytes, where: str) -> Document:
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise AccessDeniedError(f"{where} is not a JSON object")
    return value


def _text(entries: Document, field: str) -> str:
    value = entries[field]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} is not a text")
    return value


def _reason(error: BaseException) -> str:
    """Without the values, which may be secrets."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)[:MAX_SHOWN_CHARS]
