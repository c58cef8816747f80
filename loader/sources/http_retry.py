"""Trying again what failed in passing: how often, after which pause, and when that has become senseless.

An attempt that got on a good deal starts the count anew, so that a range on a poor line gets through in
pieces. Across all reads of a source, retries are paid from a budget that successes fill: where a tenth of all
attempts fails for long, the source is refused soon, with an error that says so, in place of being asked ever more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..errors import SourceError, UnavailableError
from . import checks
from .base import SourceOptions
from .budget import Budget
from .http_statistics import Tally
from .throttle import Throttle, pause_s
from .wire import WireError

MAX_MENDS = 3  # times that a door may put right what one request was refused for
PROGRESS_BYTES = 256 * 1024  # an attempt that brought so much has not failed for nothing
RETRY_SHARE = 0.1  # of a retry that each success allows, beside those that each connection has for free
MAX_RETRIES = 100.0  # that may be saved up

T = TypeVar("T")


class MendedError(Exception):
    """The door has put right what the server complained of: ask again, at once."""


class Retrying:
    """The retries of one source. Thread-safe. Blocks without the GIL."""

    def __init__(self, source: str, options: SourceOptions, throttle: Throttle, tally: Tally) -> None:
        """`source` is its address, for messages."""
        self._source = source
        self._max_attempts = options.max_attempts
        self._throttle = throttle
        self._tally = tally
        free = options.max_attempts * options.max_connections  # so that all may fail at once, as at a restart
        self._budget = Budget(at_first=free, share=RETRY_SHARE, most=max(free, MAX_RETRIES))
        self._closed = threading.Event()

    def until_done(
        self, name: str, attempt: Callable[[bool], T], done_bytes: Callable[[], int] = lambda: 0
    ) -> T:
        """Repeat `attempt(fresh)` while that is worth it, with longer and longer pauses; its result.

        `fresh` asks for a new connection: it is set for every attempt after a failure. `done_bytes()` tells
        how far the attempts got. Raises what the last one failed with, or `SourceClosedError`.
        """
        failed = mends = reached_bytes = 0
        while True:
            if not self._throttle.enter():
                raise checks.closed(self._source, name)
            try:
                result = attempt(failed > 0)
            except MendedError:
                mends += 1
                if mends <= MAX_MENDS:
                    continue
                failure = self._unavailable(name, f"{self._source} refuses {name} again and again")
            except WireError as error:
                failure = self._from_wire(name, error)
            except UnavailableError as error:
                failure = error
            else:
                self._budget.earn()
                return result
            finally:
                self._throttle.leave()
            if self._closed.is_set():
                raise checks.closed(self._source, name) from failure
            if done_bytes() - reached_bytes >= PROGRESS_BYTES:
                failed, reached_bytes = 0, done_bytes()
            failed += 1
            if failed >= self._max_attempts:
                raise _given_up(failure, f"after {failed} attempts") from failure
            if not self._budget.spend():
                raise _given_up(failure, "too many requests to this source fail to try again") from failure
            self._tally.add(retries=1)
            self._closed.wait(pause_s(failed, failure.retry_after_s))

    def close(self) -> None:
        """Whoever waits here, or comes here, gives up. Idempotent."""
        self._closed.set()
        self._throttle.close()

    def _from_wire(self, name: str, error: WireError) -> UnavailableError:
        message = f"{name or 'the list'} could not be read from {self._source}: {error}"
        if error.is_final:
            hint = "Set SSL_CERT_FILE to the certificates to trust, or correct the address."
            raise SourceError(message, source=self._source, name=name, hint=hint) from error
        hint = "Check the address and the network; proxies (HTTPS_PROXY) are not used."
        failure = self._unavailable(name, message, hint=hint)
        failure.__cause__ = error
        return failure

    def _unavailable(self, name: str, message: str, *, hint: str = "") -> UnavailableError:
        return UnavailableError(message, source=self._source, name=name, hint=hint)


def _given_up(failure: UnavailableError, why: str) -> UnavailableError:
    return UnavailableError(
        f"{failure.message} ({why})",
        source=failure.source,
        name=failure.name,
        hint=failure.hint,
        retry_after_s=failure.retry_after_s,
    )
