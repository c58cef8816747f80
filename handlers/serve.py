"""`teneral serve`: the port and the stream of weights first, then everything else beside it.

The listening socket is bound before anything heavy is imported: clients that come early wait in its backlog instead of
being refused. The tokenizer's process, and the loader's where there is one, are forked off while this one is still
small. The instance's threads then import while the web server is being imported here. Or a standby process takes it all
over, as soon as the port is bound.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ..loader.timeline import Timeline
from ..runtime.config import ServeConfig
from ..runtime.start import SentFor, send_for
from .http.sockets import listen, max_files, require_files
from .platforms import TRAITS, Platform, platform_of

if TYPE_CHECKING:
    from ..runtime.instance import Instance


def run_server(config: ServeConfig) -> int:
    """Serve until a signal ends it. Returns 0; raises the error that ended the instance.

    Blocks. Changes the process: logging, and the OpenMP policy.
    """
    platform = platform_of(config.platform, os.environ)
    config = config.replace(platform=str(platform))
    if platform is Platform.LAMBDA:
        from .platforms.aws_lambda.command import run_lambda  # few run there

        with _ending_at_once():
            return run_lambda(config)
    with _ending_at_once() as ending:
        if platform is Platform.RUNPOD_QUEUE:
            from .platforms.runpod import run_runpod_queue  # and there

            return run_runpod_queue(config)
        return _run(config, ending)


def _run(config: ServeConfig, ending: Ending) -> int:
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    require_files(max_files())
    with listen(config.host, config.port) as sock:
        timeline.mark("process", "port open")
        if config.standby_socket is not None:
            from .standby.client import hand_over  # few have a pool

            status = hand_over(config, sock, timeline)
            if status is not None:
                return status
        sent = send_for(config, timeline, fork=True)
        serve_on(sock, config, timeline, sent, ending)
    return 0


def serve_on(
    sock: socket.socket,
    config: ServeConfig,
    timeline: Timeline,
    sent: SentFor | None,
    ending: Ending | None = None,
) -> None:
    """Serve at a listening socket what was sent for already, until a signal ends it. Closes the socket.

    Blocks. Raises the error that ended the instance. `ending` learns of a failure as soon as there is one.
    """
    ending = ending or Ending()
    with (
        sock,
        _probe_socket(config) as probe_sock,
        sent.take_over(timeline) if sent else nullcontext() as helpers,
    ):
        load = helpers.load if helpers is not None else None
        if load is not None:
            ending.has_failed = lambda: load.failure is not None
        with timeline.span("process", "import runtime"):
            import logging

            from ..runtime.instance import Instance
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        logging.getLogger("torch").setLevel(logging.WARNING)  # at info it tells of its caches when it ends
        with (
            Instance(config, timeline=timeline, helpers=helpers) as instance,
            _standby_beside(config, instance),
        ):
            ending.has_failed = lambda: instance.failure is not None
            with timeline.span("process", "import server"):
                import asyncio  # here, not above: the first bytes were asked for before it was needed

                from .app import Limits, create_app, serve
                from .function.handler import load_handler
            instance.kind.add_done_callback(lambda _: _collect_garbage())
            limits = Limits.from_config(config)
            handler = load_handler(config.handler, max_calls=limits.max_in_flight) if config.handler else None
            platform = platform_of(config.platform, os.environ)
            app = create_app(instance, handler=handler, limits=limits, platform=platform)
            drain_timeout_s = config.drain_timeout_s
            if drain_timeout_s is None:
                drain_timeout_s = TRAITS[platform].drain_timeout_s
            host, port = sock.getsockname()[:2]
            print(
                f"teneral: {instance.model_name} on http://{_shown(host)}:{port}", file=sys.stderr, flush=True
            )
            most = limits.within_files(max_files()).max_connections
            if most < limits.max_connections:
                print(
                    f"teneral: {most} connections at a time, because ulimit -n is {max_files()}",
                    file=sys.stderr,
                    flush=True,
                )
            if probe_sock is not None:
                print(f"teneral: probes at port {probe_sock.getsockname()[1]}", file=sys.stderr, flush=True)
            try:
                more = () if probe_sock is None else (probe_sock,)
                failure = asyncio.run(serve(app, sock, drain_timeout_s=drain_timeout_s, more_sockets=more))
            finally:
                if handler is not None:
                    handler.close()
    if failure is not None:
        raise failure


def _collect_garbage() -> None:
    """From now on; off since the process began. What importing has left is not looked through, now or ever: that would
    hold up the first request by a quarter of a second, and find a few megabytes.
    """
    gc.freeze()
    gc.enable()


def _standby_beside(config: ServeConfig, instance: Instance) -> AbstractContextManager[None]:
    """Keeps the standby pool that the configuration asks for."""
    if config.standby == 0:
        return nullcontext()
    from .standby.beside import pool_beside  # few keep one

    return pool_beside(config, instance.wait_exact)


class Ending:
    """Whether the process is about to end with an error, whose exit code a signal must not hide."""

    def __init__(self) -> None:
        self.has_failed: Callable[[], bool] = lambda: False


@contextmanager
def _ending_at_once() -> Iterator[Ending]:
    """While in here, and until the server has its own handlers, which drain, a signal ends the process: there is
    nothing to drain yet, and the loader's process ends when this one does. After a failure the process ends by itself,
    with its exit code; SIGTERM has no effect then, until the end.

    Not by an exception: where one is raised while an import cleans up, or in the import of the user's handler, it is
    swallowed, and the server goes on.
    """
    ending = Ending()

    def end(*_: object) -> None:
        if not ending.has_failed():
            os._exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ending
    finally:
        failed = ending.has_failed()
        ending.has_failed = lambda: failed
        for number, handler in before.items():
            if not (failed and number == signal.SIGTERM):
                signal.signal(number, handler)


def _probe_socket(config: ServeConfig) -> AbstractContextManager[socket.socket | None]:
    """Another one, for a platform that sends its probes to another port. All routes are there, too: who may come is the
    platform's to say at both.
    """
    if config.health_port is None or config.health_port == config.port:
        return nullcontext()
    return listen(config.host, config.health_port)


def _shown(host: str) -> str:
    """The address as a person would type it."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
