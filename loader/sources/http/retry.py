"""Retries and throttling: the number of attempts, the pauses between them, and the limit of
concurrent requests.

An attempt that made progress starts the count anew, so that a range on a poor line arrives in
pieces. Across all reads of a source, retries are paid from a token bucket that successes fill: if a
tenth of all attempts keeps failing, reads of the source soon fail, with an error that says so.

One refusal among many successes halves the limit of concurrent requests (once for all that were
sent before it), and the limit grows again with every round of successes. A second refusal before
any success, or a delay that the store asks for, makes all readers wait, longer after each round.

A store that answers no reader is in an outage: then neither attempts nor the bucket count, but the
time since the first failure (`outage.py`), one clock for all readers. When it has run out, each
reader asks a last time, without waiting for its turn: with many readers, the turns of a busy store
would take several times as long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from ...errors import SourceError, UnavailableError
from .. import base
from ..base import SourceOptions
from .head import WrongAnswerError
from .outage import HttpTally, Outage
from .wire import WireError


class TokenBucket:
    """A token bucket. Thread-safe; never blocks."""

    def __init__(self, *, at_first: float, share: float, most: float) -> None:
        """Start with `at_first` tokens; each success adds `share` of one, up to `most`."""
        self._tokens = at_first
        self._share = share
        self._most = most
        self._lock = threading.Lock()

    def earn(self) -> None:
        with self._lock:
            self._tokens = max(self._tokens, min(self._most, self._tokens + self._share))

    def spend(self) -> bool:
        """Take one token; False when there is none."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
MAX_RETRY_AFTER_S = 20.0


class Throttle:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._usual = 0  # concurrent attempts when the store was first busy
        self._limit = math.inf
        self._not_before_s = 0.0  # on time.monotonic()'s clock
        self._reduced_s = -math.inf
        self._refusals = 0  # since the last success
        self._rounds = 0  # of requests that were refused since then
        self._closed = False

    @property
    def limit(self) -> float:
        """The limit of concurrent attempts; infinite while the store was not busy."""
        return self._limit

    @property
    def is_pausing(self) -> bool:
        return time.monotonic() < self._not_before_s

    def enter(self, patience_s: Callable[[], float] = lambda: math.inf) -> bool:
        """Wait for a place, without the GIL; False when closed. An admitted caller must `leave`.

        A caller whose `patience_s` is used up is admitted at once. It is asked again whenever a
        place becomes free.
        """
        with self._changed:
            while not self._closed:
                pause_s, left_s = self._not_before_s - time.monotonic(), patience_s()
                if left_s <= 0 or (pause_s <= 0 and self._under_way < self._limit):
                    self._under_way += 1
                    return True
                wait_s = min(left_s, pause_s if pause_s > 0 else math.inf)
                self._changed.wait(wait_s if wait_s < math.inf else None)
            return False

    def leave(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def succeeded(self) -> None:
        with self._changed:
            self._refusals = self._rounds = 0
            if self._limit < math.inf:
                self._limit += 1 / self._limit
                if self._limit >= self._usual:
                    self._limit = math.inf
                self._changed.notify_all()

    def refused(self, *, asked_s: float, wish_s: float | None) -> None:
        """The store was too busy for what was asked at `asked_s`, and wishes to be left alone for
        `wish_s`.
        """
        with self._changed:
            now_s = time.monotonic()
            self._refusals += 1
            if asked_s > self._reduced_s:
                self._rounds += 1
                self._usual = max(self._usual, self._under_way)
                self._limit = max(1, min(self._limit, self._under_way) // 2)
                self._reduced_s = now_s
            if self._refusals > 1 or wish_s is not None:
                self._not_before_s = max(self._not_before_s, now_s + pause_s(self._rounds, wish_s))

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def pause_s(failed: int, retry_after_s: float | None, chance: float | None = None) -> float:
    """The pause before the next attempt, after `failed` of them; `chance` in [0, 1) is for
    tests.

    Full jitter: many containers that started together must not come back together. The server's own
    wish is honoured within a bound, and not undercut.
    """
    if chance is None:
        import random  # only after a failure

        chance = random.uniform(0, 1)  # noqa: S311 - spreads pauses, keeps no secret
    pause = chance * min(MAX_PAUSE_S, FIRST_PAUSE_S * (1 << failed))
    return pause if retry_after_s is None else min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S) + pause


MAX_MENDS = 3  # renewals (of a credential, say) after which one request is repeated at once
PROGRESS_BYTES = 256 * 1024  # an attempt that read this much made progress
# The part of a retry that each success earns, in addition to the free ones of each connection.
RETRY_SHARE = 0.1
MAX_RETRIES = 100.0  # that may be saved up
MAX_DOUBLINGS = 10  # of a pause, which is bounded anyway

T = TypeVar("T")


class MendedError(Exception):
    """The cause of the refusal is mended, a credential for example: repeat the request at once."""


class Retrying:
    """The retries of one source. Thread-safe. Blocks without the GIL."""

    def __init__(
        self, source: str, options: SourceOptions, throttle: Throttle, tally: HttpTally, *, verb: str
    ) -> None:
        """`source` is its address, and `verb` what is done with its objects: for messages."""
        self._source = source
        self._verb = verb
        self._options = options
        self.outage = Outage()
        self._throttle = throttle
        self._tally = tally
        # So that all may fail at once, as at a restart.
        free = options.max_attempts * options.max_connections
        self._bucket = TokenBucket(at_first=free, share=RETRY_SHARE, most=max(free, MAX_RETRIES))
        self._closed = threading.Event()

    def until_done(
        self, name: str, attempt: Callable[[bool], T], done_bytes: Callable[[], int] = lambda: 0
    ) -> T:
        """Repeat `attempt(fresh)` while that is worth it, with longer and longer pauses; its
        result.

        `fresh` asks for a new connection: it is set for every attempt after a failure.
        `done_bytes()` tells how far the attempts got. Raises what the last one failed with, or
        `SourceClosedError`.
        """
        with closing(_Tries(self._options, self.outage, self._bucket)) as tries:
            return self._until_done(name, attempt, done_bytes, tries)

    def _until_done(
        self, name: str, attempt: Callable[[bool], T], done_bytes: Callable[[], int], tries: _Tries
    ) -> T:
        mends = reached_bytes = 0
        while True:
            if not self._throttle.enter(lambda: self.outage.left_s(self._options.outage_s)):
                raise base.closed(self._source, name)
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
                self._bucket.earn()
                self.outage.succeeded()
                return result
            finally:
                self._throttle.leave()
            if self._closed.is_set():
                raise base.closed(self._source, name) from failure
            if done_bytes() - reached_bytes >= PROGRESS_BYTES:
                reached_bytes = done_bytes()
                self.outage.succeeded()
                tries.progressed()
            why = tries.failed(failure.message, is_outage=is_outage)
            if why:
                raise _given_up(failure, why) from failure
            self._tally.add(retries=1)
            pause = pause_s(min(tries.num_failed, MAX_DOUBLINGS), failure.retry_after_s)
            left_s = self.outage.left_s(self._options.outage_s)
            self._closed.wait(min(pause, left_s) if left_s > 0 else pause)

    def close(self) -> None:
        """End the waits of all callers, now and later. Idempotent."""
        self._closed.set()
        self._throttle.close()

    def _from_wire(self, name: str, error: WireError) -> UnavailableError:
        message = f"{name or 'the list'} could not be {self._verb} {self._source}: {error}"
        if error.is_final:
            hint = (
                error.hint
                or "Set SSL_CERT_FILE or REQUESTS_CA_BUNDLE to the certificates to trust, or correct the address."
            )
            raise SourceError(message, source=self._source, name=name, hint=hint) from error
        hint = error.hint or "Check the address, the network and HTTPS_PROXY, HTTP_PROXY and NO_PROXY."
        failure = self._unavailable(name, message, hint=hint)
        failure.__cause__ = error
        return failure

    def _unavailable(self, name: str, message: str, *, hint: str = "") -> UnavailableError:
        return UnavailableError(message, source=self._source, name=name, hint=hint)


class _Tries:
    """The attempts of one read since its last progress. `close` it when the read is over."""

    def __init__(self, options: SourceOptions, outage: Outage, bucket: TokenBucket) -> None:
        self._options = options
        self._outage = outage
        self._bucket = bucket
        self._is_waiting = False  # for the store to come back
        self.progressed()

    def progressed(self) -> None:
        """Begin to count anew."""
        self.num_failed = 0
        self._num_counted = 0  # of these, outside of an outage that goes on
        self._outage_number: int | None = None  # in which the last one failed

    def close(self) -> None:
        """The read has got what it wanted, or is given up."""
        if self._is_waiting:
            self._is_waiting = False
            self._outage.leave()

    def failed(self, reason: str, *, is_outage: bool) -> str:
        """Note a failure. Returns why it was the last one, '' for another try."""
        self.num_failed += 1
        if is_outage and not self._is_waiting:
            self._is_waiting = True
            self._outage.join()
        number, lasted_s = self._outage.failed(reason) if is_outage else (None, 0.0)
        # A failure counts unless it continues an outage in which this read has failed before.
        goes_on = number is not None and number == self._outage_number
        self._outage_number = number
        if goes_on and lasted_s < self._options.outage_s:
            return ""
        if goes_on and self._options.outage_s > 0:
            return f"after {self.num_failed} attempts; nothing has come for {lasted_s:.0f} s"
        self._num_counted += 1
        if self._num_counted >= self._options.max_attempts:
            return f"after {self.num_failed} attempts"
        return "" if self._bucket.spend() else "too many requests to this source fail to try again"


def _given_up(failure: UnavailableError, why: str) -> UnavailableError:
    return UnavailableError(
        f"{failure.message} ({why})",
        source=failure.source,
        name=failure.name,
        hint=failure.hint,
        retry_after_s=failure.retry_after_s,
    )
