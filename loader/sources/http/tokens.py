"""Bearer tokens: kept until shortly before they end, renewed when a store refuses them, and never
shown.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from ...errors import AccessDeniedError, SourceError, UnavailableError
from ..base import SourceOptions
from .connections import Connection, proxies_of_environment, tls_context
from .head import Head, Headers, Request
from .poll_coroutines import run
from .wire import AddressBook, WireError

AGAIN_S = 30.0  # until the next attempt to renew a token that is still good
MAX_LIFETIME_S = 24 * 3600.0
MAX_ANSWER_BYTES = 64 << 10
TIMEOUT_S = 3.0
ATTEMPTS = 3
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")


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


class TokenCache:
    """The token of one store. Thread-safe. `ask` is called when one is first needed."""

    def __init__(self, ask: Callable[[], Token], *, renew_s: float) -> None:
        """A token is asked for anew so long before it ends."""
        self._ask = ask
        self._renew_s = renew_s
        self._token: Token | None = None
        self._asked_s = -AGAIN_S
        self._lock = threading.Lock()

    def get(self) -> str:
        """A token that is good now. May ask a server, other threads wait for it meanwhile.

        Raises `AccessDeniedError`, `UsageError`, and `UnavailableError` for what is worth another
        try.
        """
        with self._lock:
            return self._get().text

    def renew(self, refused: str) -> bool:
        """Look again, after the store refused this token. Whether there is another one now."""
        with self._lock:
            if self._get().text == refused:
                self._token = None
            return self._get().text != refused

    def renews(self, request: Request) -> bool:
        """Renew the token of a request that was refused; False where it has none."""
        scheme, _, token = dict(request.private_headers).get("Authorization", "").partition(" ")
        return scheme == "Bearer" and self.renew(token)

    def forget(self) -> None:
        """Ask again when a token is next needed."""
        with self._lock:
            self._token = None

    def _get(self) -> Token:
        held = self._token
        if held is not None and not held.ends_within(self._renew_s):
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


def bearer(token: str) -> Headers:
    return (("Authorization", f"Bearer {token}"),)


def exchange(request: Request, *, timeout_s: float = TIMEOUT_S) -> tuple[Head, bytes]:
    """The answer of a token service, over a connection of its own. `timeout_s` suits one on the local
    network.

    Raises `WireError`, `OSError`, `BodyTooLargeError`, and `UsageError` for a proxy that cannot be used.
    """
    options = SourceOptions(connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
    tls = tls_context() if request.origin.scheme == "https" else None
    proxies = proxies_of_environment()
    proxy = None if proxies is None else proxies.of(request.origin)
    connection = Connection(request.origin, options, tls, AddressBook(), proxy)
    try:
        head = run(connection.exchange(request))
        return head, run(connection.read_all(MAX_ANSWER_BYTES))
    finally:
        connection.close()


def is_overloaded(status: int) -> bool:
    """True for the statuses of a token service that is worth another try."""
    return status == 429 or status >= 500


def ask_service(
    request: Request,
    service: str,
    *,
    hint: str,
    pause_s: float,
    is_busy: Callable[[int], bool] = is_overloaded,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Head, bytes]:
    """The good answer of a token service, which is asked again after an outage and while it is busy.

    Raises the errors of `exchange`, `AccessDeniedError` with the `hint` for a refusal, and
    `UnavailableError` where it stays overloaded.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            head, body = exchange(request, timeout_s=timeout_s)
        except WireError as error:
            if not left or not error.is_outage:
                raise
        else:
            if not left or not is_busy(head.status):
                break
        time.sleep(pause_s)
    if head.status == 200:
        return head, body
    message = f"{service} answers {head.status} in place of a token"
    if is_overloaded(head.status):
        raise UnavailableError(message, retry_after_s=head.retry_after_s)
    raise AccessDeniedError(message, hint=hint)
