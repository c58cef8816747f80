"""The bounds of the HTTP API on untrusted input, and the headers that no message takes beyond its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from .listening import MIN_CONNECTIONS, RESERVED_FILES

if TYPE_CHECKING:
    from ...runtime.config import ServeConfig

# 414 beyond the first, 431 beyond the others.
MAX_REQUEST_LINE_BYTES = 8 << 10
MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
# Our own bound, for a head as a whole.
MAX_HEAD_BYTES = 64 << 10
# A client's maximum of unread stream data in this process (in the kernel:
# `listening.SEND_BUFFER_BYTES`). Written in pieces, with a check between any two.
MAX_UNSENT_BYTES = 64 << 10
PIECE_BYTES = 16 << 10
# Longer than any load balancer keeps an idle connection (Google's 600 s is the longest): the server
# must not close first, or a request on its way meets a closed socket.
IDLE_CONNECTION_S = 620.0
# Headers of one connection, not of a message: a proxy passes none of them on.
HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
    ]
)
OWN_HEADERS = HOP_BY_HOP | {"host", "content-length"}  # with those that each sender writes anew


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. The defaults are those of `ServeConfig`."""

    max_connections: int = 1024  # open at the same time
    head_timeout_s: float = 30.0  # for the head of a request to arrive, from its first byte
    max_body_bytes: int = 8 << 20
    # The memory of the bodies of all requests together.
    max_body_bytes_in_flight: int = 64 << 20
    body_timeout_s: float = 60.0  # for a body to arrive
    # The memory of the log probabilities of one answer that is not streamed.
    max_answer_bytes: int = 64 << 20
    max_answer_bytes_in_flight: int = 256 << 20  # of all of them together
    max_in_flight: int = 352  # in progress, including waiting ones
    # Sequences running, queued or on their way to the engine: the engine's own limit.
    max_taken: int = 288
    max_sequences: int = 128  # of one request: n × prompts
    max_embedding_inputs: int = 2048
    # Steps of a stream that its client has not read yet.
    max_pending_events: int = 8192
    keepalive_s: float = 5.0  # between keep-alives of an idle stream
    write_stall_s: float = 60.0  # for a client to read what was written
    unload_drain_s: float = 30.0  # for running requests when the model is unloaded
    # From the engine's admission: waiting for weights does not count.
    request_timeout_s: float = 600.0

    @classmethod
    def from_config(cls, config: ServeConfig) -> Limits:
        taken = config.max_calls
        max_in_flight = taken + 64  # some extra for /invoke and embeddings
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
        """The limits with no more connections than a process with that limit of open files (`ulimit
        -n`) can have.
        """
        most = max(MIN_CONNECTIONS, num_files - RESERVED_FILES)
        return replace(self, max_connections=min(self.max_connections, most))
