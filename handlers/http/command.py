"""`teneral serve`: the stream of weights first, then the port, then everything else beside it.

The loader's process is forked off while this one is still small. The listening socket is bound before anything heavy
is imported: clients that come early wait in its backlog instead of being refused. The instance's threads then import
while the web server is being imported here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ...loader.errors import UsageError
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from ...runtime.errors import PortInUseError
from ...runtime.start import start_load

BACKLOG = 1024


def run_server(config: ServeConfig) -> int:
    """Serve until a signal ends it. Returns 0; raises the error that ended the instance.

    Blocks. Changes the process: logging, and the OpenMP policy (below).
    """
    with _ending_at_once():
        return _run(config)


def _run(config: ServeConfig) -> int:
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    load = start_load(config, timeline, fork=True)
    with load or nullcontext(), listen(config.host, config.port) as sock:
        timeline.mark("process", "port open")
        with timeline.span("process", "import runtime"):
            import logging

            from ...runtime.instance import Instance
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        logging.getLogger("torch").setLevel(logging.WARNING)  # at info it tells of its caches when it ends
        with Instance(config, timeline=timeline, load=load) as instance:
            with timeline.span("process", "import server"):
                import asyncio  # here, not above: the first bytes were asked for before it was needed

                from ..function import load_handler
                from .app import Limits, create_app, serve
            handler = load_handler(config.handler) if config.handler else None
            app = create_app(instance, handler=handler, limits=Limits.from_config(config))
            host, port = sock.getsockname()[:2]
            print(
                f"teneral: {instance.model_name} on http://{_shown(host)}:{port}", file=sys.stderr, flush=True
            )
            try:
                failure = asyncio.run(serve(app, sock, drain_timeout_s=config.drain_timeout_s))
            finally:
                if handler is not None:
                    handler.close()
    if failure is not None:
        raise failure
    return 0


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """While in here, and until the server has its own handlers, which drain, a signal ends the process: there is
    nothing to drain yet, and the loader's process ends when this one does.

    Not by an exception: where one is raised while an import cleans up, or in the import of the user's handler, it is
    swallowed, and the server goes on.
    """
    before = {
        number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `PortInUseError` or `UsageError` naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host!r}: {error}", key="host") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        hint = "Stop what listens there, or choose another with --port (0 takes a free one)."
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return sock


def _shown(host: str) -> str:
    """The address as a person would type it."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
