"""The requests that write to a web store, over a client of their own."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import TeneralError
from ..base import SourceOptions, lost
from .client import HttpClient, ObjectServer
from .head import Head, Request

MIN_TIMEOUT_S = 60.0  # a store may be silent for long while it puts an object together


class HttpUploads:
    """The base of a `BucketUploads`. Thread-safe. Names are relative to the store's prefix."""

    def __init__(self, server: ObjectServer, options: SourceOptions) -> None:
        """Nothing is sent twice at the same time, and a store that is away is given up after
        `max_attempts`.
        """
        timeout_s = max(MIN_TIMEOUT_S, options.read_timeout_s)
        options = options._replace(
            read_timeout_s=timeout_s, min_rate_bytes_s=0, hedge_after_s=0.0, outage_s=0.0
        )
        self.url = server.url
        self._client = HttpClient(server, options, verb="written to")

    def quiesce(self) -> None:
        """Close idle connections, before the process may stand still. Does not block."""
        self._client.quiesce()

    def close(self) -> None:
        """Requests under way raise `SourceClosedError`, as later ones do. Idempotent."""
        self._client.close()

    def _send(
        self,
        name: str,
        build: Callable[[], Request],
        *,
        is_lost: Callable[[Head, bytes], bool] = lambda head, body: False,
    ) -> tuple[Head, bytes]:
        """The good answer to `build()`. Raises `AlreadyExistsError` for a refusal that `is_lost`: its
        condition did not hold.
        """

        def explain(head: Head, body: bytes) -> TeneralError | None:
            return lost(self.url, name) if is_lost(head, body) else None

        return self._client.send(name, build, explain)
