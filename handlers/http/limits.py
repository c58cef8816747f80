"""The bounds that the HTTP face puts on what comes from outside, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .sockets import MIN_CONNECTIONS, RESERVED_FILES

if TYPE_CHECKING:
    from ...runtime.config import ServeConfig

# aiohttp answers 400 beyond these.
MAX_REQUEST_LINE_BYTES = 8 << 10
MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
# Ours, for a head as a whole.
MAX_HEAD_BYTES = 64 << 10
# Of a stream, what a client may leave unread in this process (in the kernel: `sockets.SEND_BUFFER_BYTES`). Written in
# pieces, with a look between any two.
MAX_UNSENT_BYTES = 64 << 10
PIECE_BYTES = 16 << 10
# Longer than any load balancer keeps an idle connection (Google's 600 s is the longest): who closes first
# must not be us, or a request that is on its way meets a closed socket.
IDLE_CONNECTION_S = 620.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes, times in seconds. The defaults are those of `ServeConfig`."""

    max_connections: int = 1024  # open at the same time
    head_timeout_s: float = 30.0  # for the head of a request to arrive, from its first byte
    max_body_bytes: int = 8 << 20
    max_body_bytes_in_flight: int = 64 << 20  # of all requests together: what bodies may cost in memory
    body_timeout_s: float = 60.0  # for a body to arrive
    max_answer_bytes: int = (
        64 << 20
    )  # of one answer that is not streamed: what its log-probabilities may cost
    max_answer_bytes_in_flight: int = 256 << 20  # of all of them together
    max_in_flight: int = 352  # requests being worked on, waiting ones included
    max_taken: int = (
        288  # sequences running, queued or on their way to the engine: what the engine itself takes
    )
    max_sequences: int = 128  # of one request: n × prompts
    max_embedding_inputs: int = 2048
    max_pending_events: int = 8192  # steps of a stream that its client has not taken yet
    keepalive_s: float = 5.0  # between signs of life on a stream where nothing flows
    write_stall_s: float = 60.0  # for a client to take what was written
    unload_drain_s: float = 30.0  # for what runs to end when the model is unloaded
    request_timeout_s: float = 600.0  # from when the engine took it: waiting for weights does not count

    @classmethod
    def from_config(cls, config: ServeConfig) -> Limits:
        taken = config.max_running + config.max_queued
        max_in_flight = taken + 64  # some to spare for /invoke and embeddings
        return cls(
            max_connections=max(1024, 2 * max_in_flight),
            max_body_bytes=config.max_body_bytes,
            max_body_bytes_in_flight=max(64 << 20, 2 * config.max_body_bytes),
            max_in_flight=max_in_flight,
            max_taken=taken,
            max_sequences=min(128, taken),
            request_timeout_s=config.request_timeout_s,
        )

    def within_files(self, num_files: int) -> Limits:
        """With no more connections than a process has room for that may have so many files open (`ulimit -n`)."""
        most = max(MIN_CONNECTIONS, num_files - RESERVED_FILES)
        return replace(self, max_connections=min(self.max_connections, most))
