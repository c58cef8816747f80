"""Credentials that a container's platform hands out: the answer to one GET, at an address that the
environment names.

That is how tasks of ECS, Fargate and AWS Batch, SageMaker's containers and pods of EKS with Pod
Identity get those of their role. boto3 gets them, too, once it is imported, for which a cold start
would wait 0.3 s. The rules are those of AWS's "container credential provider"
(https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html) and, for what
comes before it, of boto3's chain. Where one of them says something else there is no answer here.
"""

from __future__ import annotations

import os.path
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from ..http.address import Origin
from ..http.connections import BodyTooLargeError
from ..http.head import Headers, Request
from ..http.tokens import AGAIN_S, MAX_ANSWER_BYTES, exchange
from ..http.wire import WireError
from .sigv4 import Credentials

RENEW_S = 600.0  # before they expire, as boto3 does at the latest
TIMEOUT_S = 2.0
_ECS = "169.254.170.2"
_KNOWN_HOSTS = frozenset((_ECS, "169.254.170.23", "fd00:ec2::23", "localhost", "::1"))
_FULL = re.compile(r"http://(?:\[([0-9A-Fa-f:]+)\]|([0-9A-Za-z.]+))(?::(\d{1,5}))?(/[\x21-\x7e]*)?")
_RELATIVE = re.compile(r"/[\x21-\x7e]*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_COMES_FIRST = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "BOTO_CONFIG",
)
_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("", "/etc/boto.cfg"),
    ("", "~/.boto"),
)


class Endpoint(NamedTuple):
    """An endpoint that hands out credentials."""

    origin: Origin
    target: str


class ContainerCredentials:
    """For one thread at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Looks at the environment and for files; sends no request yet."""
        self._environment = environment
        self._endpoint = find_endpoint(environment)
        self._found: Credentials | None = None
        self._expires = ""  # as the endpoint gave it, in UTC; "" for never
        self._asked_s = -AGAIN_S

    def get(self) -> Credentials | None:
        """Credentials that are valid now; None where boto3 is to be asked. Blocks for up to some
        seconds.
        """
        if self._endpoint is None:
            return None
        if self._found is None or (self._ends_within(RENEW_S) and self._asked_s + AGAIN_S < time.monotonic()):
            self._asked_s = time.monotonic()
            try:
                self._found, self._expires = ask(self._endpoint, _authorization(self._environment))
            except (WireError, BodyTooLargeError, OSError, ValueError, KeyError, TypeError):
                if self._found is None or self._ends_within(0):
                    self._found = None
        return self._found

    def forget(self) -> None:
        """Ask again when they are next needed."""
        self._found = None

    def _ends_within(self, margin_s: float) -> bool:
        then = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + margin_s))
        return bool(self._expires) and self._expires[: len(then)] <= then


def find_endpoint(environment: Mapping[str, str]) -> Endpoint | None:
    """The platform's, where it names one that may be asked without TLS, and nothing comes before
    it.
    """
    if any(environment.get(name) for name in _COMES_FIRST):
        return None
    if any(os.path.exists(os.path.expanduser(environment.get(name) or path)) for name, path in _FILES):
        return None
    if relative := environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return Endpoint(Origin("http", _ECS, 80), relative) if _RELATIVE.fullmatch(relative) else None
    full = _FULL.fullmatch(environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or "")
    if full is None:
        return None
    host = (full[1] or full[2]).lower()
    port = int(full[3] or 80)
    is_known = host in _KNOWN_HOSTS or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None
    return Endpoint(Origin("http", host, port), full[4] or "/") if is_known and 0 < port < 1 << 16 else None


def ask(endpoint: Endpoint, headers: Headers) -> tuple[Credentials, str]:
    """The credentials and their expiry: ISO 8601 in UTC, "" for none. Raises
    `WireError`, `OSError`, `BodyTooLargeError`, and `ValueError`, `KeyError` or `TypeError` for an
    answer that is none.
    """
    request = Request("GET", endpoint.origin, endpoint.target, (), headers)
    head, body = exchange(request, timeout_s=TIMEOUT_S)
    if head.status != 200:
        raise ValueError(f"it answers with status {head.status}")
    import json  # not before the first request is on its way

    fields = json.loads(body.decode())
    key_id, secret = fields["AccessKeyId"], fields["SecretAccessKey"]
    token, expires = fields.get("Token") or None, fields.get("Expiration") or ""
    if (
        not all(type(text) is str for text in (key_id, secret, token or "", expires))
        or not key_id
        or not secret
    ):
        raise ValueError("these are no credentials")
    if expires and not _TIME.fullmatch(expires):
        raise ValueError("this is no time")
    return Credentials(key_id, secret, token), expires


def _authorization(environment: Mapping[str, str]) -> Headers:
    """The token that the platform wants to see. Raises `OSError` and `ValueError`."""
    token = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN") or ""
    if path := environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        with open(path, "rb") as file:
            token = file.read(MAX_ANSWER_BYTES).decode()
    if not token:
        return ()
    if not token.isascii() or not token.isprintable():
        raise ValueError("the authorization token cannot stand in a header")
    return (("Authorization", token),)
