"""Access tokens for Cloud Storage: from a credential file, else from the metadata server.

The metadata server is asked over `http1`, so that a container on Cloud Run or a pod of GKE imports nothing for its
token. What a file says is `credential_files.py`'s business.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from ...errors import AccessDeniedError, SourceError, UnavailableError, UsageError
from ..addresses import AddressBook
from ..base import SourceOptions
from ..http1 import BodyTooLargeError, Connection
from ..http_head import Head, Headers, Request
from ..steps import Race, Steps
from ..web_address import parse_address
from ..wire import WireError

RENEW_S = 225.0  # before a token ends: the metadata server has the next one from 300 s before
AGAIN_S = 30.0  # until the next attempt to renew a token that is still good
MAX_LIFETIME_S = 24 * 3600.0
MAX_ANSWER_BYTES = 64 << 10
TIMEOUT_S = 3.0
ATTEMPTS = 3
PAUSE_S = 0.2
METADATA_HOST = "metadata.google.internal"
_TOKEN_TARGET = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path
_FLAVOR = ("Metadata-Flavor", "Google")
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_FILE = "application_default_credentials.json"


class Token:
    """A bearer token and the time until which it is good, on time.monotonic()'s clock. Never shown."""

    __slots__ = ("ends_s", "text")

    def __init__(self, text: object, lifetime_s: object) -> None:
        """Raises `ValueError` for values that are no token or no lifetime."""
        if not isinstance(text, str) or not _TOKEN.fullmatch(text):
            raise ValueError("the answer holds no access token")
        if isinstance(lifetime_s, bool) or not isinstance(lifetime_s, int | float) or not lifetime_s > 0:
            raise ValueError("the answer does not say how long the token is good")
        self.text = text
        self.ends_s = time.monotonic() + min(float(lifetime_s), MAX_LIFETIME_S)

    def __repr__(self) -> str:
        return "Token(***)"

    def ends_within(self, margin_s: float) -> bool:
        return time.monotonic() + margin_s >= self.ends_s


class TokenChain:
    """The place where tokens come from. Thread-safe. Looks for credentials when a token is first needed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._token: Token | None = None
        self._asked_s = -AGAIN_S
        self._lock = threading.Lock()

    def get(self) -> str:
        """A token that is good now. May ask a server, other threads wait for it meanwhile.

        Raises `AccessDeniedError`, `UsageError`, and `UnavailableError` for what is worth another try.
        """
        with self._lock:
            return self._get().text

    def renew(self, refused: str) -> bool:
        """Look again, after the store refused this token. Whether there is another one now."""
        with self._lock:
            if self._get().text == refused:
                self._token = None
            return self._get().text != refused

    def forget(self) -> None:
        """Ask again when a token is next needed."""
        with self._lock:
            self._token = None

    def _get(self) -> Token:
        held = self._token
        if held is not None and not held.ends_within(RENEW_S):
            return held
        if held is not None and not held.ends_within(0) and time.monotonic() < self._asked_s + AGAIN_S:
            return held
        self._asked_s = time.monotonic()
        try:
            self._token = self._ask()
        except SourceError:
            if held is None or held.ends_within(0):
                raise
            return held
        return self._token

    def _ask(self) -> Token:
        path = find_file(self._environment)
        if path is None:
            return ask_metadata(self._environment)
        from .credential_files import ask_with_file  # with http.client: for those whom it concerns

        return ask_with_file(path)


def find_file(environment: Mapping[str, str]) -> str | None:
    """The credential file: named by GOOGLE_APPLICATION_CREDENTIALS, else gcloud's own where it exists."""
    if named := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return named
    folder = environment.get("CLOUDSDK_CONFIG") or os.path.join(
        environment.get("HOME") or "~", ".config", "gcloud"
    )
    path = os.path.join(os.path.expanduser(folder), _FILE)
    return path if os.path.exists(path) else None


def ask_metadata(environment: Mapping[str, str]) -> Token:
    """The token of the machine's, the pod's or the service's own account."""
    host = environment.get("GCE_METADATA_HOST") or METADATA_HOST
    address = parse_address(f"http://{host}")
    if address is None or address.path or address.query:
        raise UsageError(
            "GCE_METADATA_HOST is not a host", key="GCE_METADATA_HOST", hint="Write host or host:port."
        )
    request = Request("GET", address.origin, _TOKEN_TARGET, (_FLAVOR,))
    for left in reversed(range(ATTEMPTS)):
        try:
            head, body = _exchange(request)
        except (WireError, BodyTooLargeError, OSError) as error:
            if left and isinstance(error, WireError) and error.is_outage:
                time.sleep(PAUSE_S)
                continue
            from .answers import WAYS_TO_GIVE

            message = "there are no credentials for Cloud Storage, and no metadata server answers"
            raise AccessDeniedError(f"{message} ({error})", hint=WAYS_TO_GIVE) from error
        if head.status == 200:
            return _token_from(head, body)
        if left and (head.status == 429 or head.status >= 500):
            time.sleep(PAUSE_S)
            continue
        break
    message = f"the metadata server answers {head.status} in place of a token"
    if head.status == 429 or head.status >= 500:
        raise UnavailableError(message, retry_after_s=head.retry_after_s)
    raise AccessDeniedError(message, hint="Give the machine, the pod or the service a service account.")


def _token_from(head: Head, body: bytes) -> Token:
    import json  # not before the first request is on its way

    try:
        if head.headers.get("metadata-flavor") != "Google":
            raise ValueError("the answer is not one of Google's metadata server")
        said: Any = json.loads(body.decode())
        return Token(said["access_token"], said["expires_in"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AccessDeniedError(
            f"the metadata server gives no token: {error}",
            hint="Check GCE_METADATA_HOST and the account of the machine, the pod or the service.",
        ) from None


def _exchange(request: Request) -> tuple[Head, bytes]:
    options = SourceOptions(connect_timeout_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S)
    connection = Connection(request.origin, options, None, AddressBook())
    try:
        head = _run(connection.exchange(request))
        return head, _run(connection.read_all(MAX_ANSWER_BYTES))
    finally:
        connection.close()


def _run(steps: Steps[Any]) -> Any:
    race = Race[Any]()
    race.enter(steps)
    while (won := race.wait()) is None:
        pass
    return won[1]


def bearer(token: str) -> Headers:
    return (("Authorization", f"Bearer {token}"),)
