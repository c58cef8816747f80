"""The listening sockets, and the open files that a server needs.

Imports next to nothing: `serve` binds its port before it asks for the weights.
"""

from __future__ import annotations

import errno
import socket

from ...loader.errors import UsageError
from ...runtime.errors import PortInUseError

BACKLOG = 1024
# A client's maximum of unread stream data in the kernel, which would otherwise let it grow to
# megabytes. Linux takes twice the number, to include its own overhead.
SEND_BUFFER_BYTES = 64 << 10
# Descriptors for everything else: a working server has 15 open, and a KV snapshot is read over
# connections of its own.
RESERVED_FILES = 40
# With fewer, probes and a platform's own connections would leave none for requests.
MIN_CONNECTIONS = 24


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. Raises `PortInUseError` or `UsageError`, naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            # As text it would import the tables of international domain names.
            host.encode() if host.isascii() else host,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host!r}: {error}", key="host") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                key="host",
                hint="Set --host to an address of this machine, and --port to a port that this user may use.",
            ) from error
        hint = "Stop what listens there, or choose another with --port (0 takes a free one)."
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return sock


def shown_address(sock: socket.socket) -> str:
    """The address that a socket is bound to, as in a URL: `127.0.0.1:8080`, `[::]:8080`."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    """True if programs of this machine alone reach a socket."""
    host = str(sock.getsockname()[0])
    return host.startswith("127.") or host == "::1"


OPEN_WARNING = (
    "no API key is set, and programs of other machines can reach this address: every client may use the server "
    "(set --api-key, or --host 127.0.0.1)"
)


def require_files(num_files: int) -> None:
    """Raise `UsageError` if the process's limit of open files is too low for a server."""
    least = RESERVED_FILES + MIN_CONNECTIONS
    if num_files < least:
        raise UsageError(
            f"this process may have {num_files} open files, but a server needs at least {least}",
            key="ulimit -n",
            hint="Raise the limit with `ulimit -n 1024`, or as nofile in the container's settings.",
        )


def max_files() -> int:
    """The process's limit of open files."""
    # Not available on every platform that may import this module.
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
