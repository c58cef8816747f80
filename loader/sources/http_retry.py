"""Trying again what failed in passing: how often, after which pause, and when that has become senseless.

An attempt that got on a good deal starts the count anew, so that a range on a poor line gets through in
pieces. Across all reads of a source, retries are paid from a budget that successes fill: where a tenth of all
attempts fails for long, the source is refused soon, with an error that says so, in place of being asked ever more.

A store that gives nothing to any reader is away: then neither attempts nor the budget count, but the time since the
first failure (`outage.py`), which is one clock for all readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..errors import SourceError, UnavailableError
from . import checks
from .base import SourceOptions
from .budget import Budget
from .http_range import WrongAnswerError
from .http_statistics import Tally
from .outage import Outage
from .throttle import Throttle, pause_s
from .wire import WireError

MAX_MENDS = 3  # times that a door may put right what one request was refused for
PROGRESS_BYTES = 256 * 1024  # an attempt that brought so much has not failed for nothing
RETRY_SHARE = 0.1  # of a retry that each success allows, beside those that each connection has for free
MAX_RETRIES = 100.0  # that may be saved up
MAX_DOUBLINGS = 10  # of a pause, which is bounded anyway

T = TypeVar("T")


class MendedError(Exception):
    """The door has put right what the server complained of: ask again, at once."""


class Retrying:
    """The retries of one source. Thread-safe. Blocks without the GIL."""

    def __init__(self, source: str, options: SourceOptions, throttle: Throttle, tally: Tally) -> None:
        """`source` is its address, for messages."""
        self._source = source
        self._options = options
        self.outage = Outage()
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
        mends = reached_bytes = 0
        tries = _Tries(self._options, self.outage, self._budget)
        while True:
            if not self._throttle.enter():
                raise checks.closed(self._source, name)
            try:
                result = attempt(tries.num_failed > 0)
            except MendedError:
                mends += 1
                if mends <= MAX_MENDS:
                    continue
                failure = self._unavailable(name, f"{self._source} refuses {name} again and again")
                is_outage = False
            except WireError as error:
                failure, is_outage = self._from_wire(name, error), error.is_outage
            except UnavailableError as error:
                failure, is_outage = error, not isinstance(error, WrongAnswerError)
            else:
                self._budget.earn()
                self.outage.succeeded()
                return result
            finally:
                self._throttle.leave()
            if self._closed.is_set():
                raise checks.closed(self._source, name) from failure
            if done_bytes() - reached_bytes >= PROGRESS_BYTES:
                reached_bytes = done_bytes()
                self.outage.succeeded()
                tries = _Tries(self._options, self.outage, self._budget)
            why = tries.failed(failure.message, is_outage=is_outage)
            if why:
                self.outage.succeeded()  # it is waited for no longer
                raise _given_up(failure, why) from failure
            self._tally.add(retries=1)
            self._closed.wait(pause_s(min(tries.num_failed, MAX_DOUBLINGS), failure.retry_after_s))

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


class _Tries:
    """The attempts of one read, since it last got on."""

    def __init__(self, options: SourceOptions, outage: Outage, budget: Budget) -> None:
        self.num_failed = 0
        self._num_counted = 0  # of these, outside of an outage that goes on
        self._outage_number: int | None = None  # in which the last one failed
        self._options = options
        self._outage = outage
        self._budget = budget

    def failed(self, reason: str, *, is_outage: bool) -> str:
        """Note a failure. Returns why it was the last one, '' for another try."""
        self.num_failed += 1
        number, lasted_s = self._outage.failed(reason) if is_outage else (None, 0.0)
        # The first failure of a read counts, and so does each one since which any other read has succeeded.
        goes_on = number is not None and number == self._outage_number
        self._outage_number = number
        if goes_on and lasted_s < self._options.outage_s:
            return ""
        self._num_counted += 1
        if goes_on and self._options.outage_s > 0 and self.num_failed >= self._options.max_attempts:
            return f"after {self.num_failed} attempts; nothing has come for {lasted_s:.0f} s"
        if self._num_counted >= self._options.max_attempts:
            return f"after {self.num_failed} attempts"
        return "" if self._budget.spend() else "too many requests to this source fail to try again"


def _given_up(failure: UnavailableError, why: str) -> UnavailableError:
    return UnavailableError(
        f"{failure.message} ({why})",
        source=failure.source,
        name=failure.name,
        hint=failure.hint,
        retry_after_s=failure.retry_after_s,
    )
