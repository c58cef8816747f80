"""Listening sockets, and the open files that a server needs.

Imports no web framework: `serve` binds its port before anything heavy is imported.
"""

from __future__ import annotations

import errno
import socket

from ...loader.errors import UsageError
from ...runtime.errors import PortInUseError

BACKLOG = 1024
# Of a stream, what a client may leave unread in the kernel, which would let it grow to megabytes. Linux takes twice the
# number, for what it needs beside the bytes.
SEND_BUFFER_BYTES = 64 << 10
# Descriptors for all else: a server that works has 15 open, and a KV snapshot is read over connections of its own.
RESERVED_FILES = 40
MIN_CONNECTIONS = 24  # with fewer, probes and a platform's own connections would leave none for work


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `PortInUseError` or `UsageError` naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.encode() if host.isascii() else host,  # a text would have letters of all languages imported
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host!r}: {error}", key="host") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of what it accepts, too
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                key="host",
                hint="Give an address of this machine with --host, and a port that this user may take with --port.",
            ) from error
        hint = "Stop what listens there, or choose another with --port (0 takes a free one)."
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return sock


def require_files(num_files: int) -> None:
    """Raises `UsageError` where a process may have too few files open to serve at all."""
    least = RESERVED_FILES + MIN_CONNECTIONS
    if num_files < least:
        raise UsageError(
            f"this process may have {num_files} files open, too few to serve: {least} are the least",
            key="ulimit -n",
            hint="Raise the limit with `ulimit -n 1024`, or as nofile in the container's settings.",
        )


def max_files() -> int:
    """Files that this process may have open."""
    import resource  # not on every platform that may import this module

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
