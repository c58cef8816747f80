"""`teneral serve`: the port and the stream of weights first, then everything else in parallel.

The listening socket is bound before anything heavy is imported: early clients wait in its backlog
instead of being refused. The tokenizer's process, and the loader's if there is one, are forked
while this one is still small. The instance's threads then import while the web server is imported
here. Or a standby process takes over everything as soon as the port is bound.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from ..loader.errors import TeneralError
from ..loader.sources.open import local_path, split_pin
from ..loader.timeline import Timeline
from ..runtime.config import ServeConfig
from ..runtime.instance.helpers import LaunchedHelpers, launch_helpers
from ..runtime.state import State
from .http.listening import OPEN_WARNING, is_loopback, listen, max_files, require_files, shown_address
from .platforms import MODEL_SIGNS, Platform, imported, is_hosted, platform_of

if TYPE_CHECKING:
    from aiohttp import web

    from ..loader.sources.base import SourceOptions
    from ..runtime.instance.instance import Instance
    from .console.early import EarlyPage
    from .function.handler import Handler
    from .http.limits import Limits

# The modules that the first request which needs them imports, where no standby process has done so.
LATER = (
    ".openai.chat", ".openai.completions", ".openai.images", ".openai.models", ".openai.tools.choose",
    ".openai.tools.grammar", ".openai.tools.reader",
    "..runtime.grammar.budget", "..runtime.grammar.compiler",
)  # fmt: skip
SHORT_LOAD_S = 2.0  # whose progress is not worth a line


def run_server(config: ServeConfig) -> int:
    """Serve until a signal ends it. Returns 0; raises the error that ended the instance.

    Blocks. Changes the process: logging, and the OpenMP policy.
    """
    platform = platform_of(config.platform, os.environ)
    config = config.replace(platform=platform.name)
    with _ending_at_once() as ending:
        if platform.run:
            status: int = imported(platform.run)(config, _make_app)
            return status
        return _run(config, ending)


def _make_app(instance: Instance, handler: Handler | None, platform: Platform) -> web.Application:
    """The whole application, for a platform whose events may be HTTP requests, too."""
    # A web server, which few functions need.
    from .app import Limits, create_app

    return create_app(
        instance, handler=handler, limits=Limits.from_config(instance.config), platform=platform
    )


def _run(config: ServeConfig, ending: Ending) -> int:
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    began_s = timeline.now_s()
    require_files(max_files())
    _require_local_model(config)
    with listen(config.host, config.port) as sock:
        timeline.add("process", "open port", began_s, timeline.now_s())
        timeline.mark("process", "port open")
        if config.standby_socket is not None:
            # Few servers have a pool.
            from .standby.handover import hand_over

            status = hand_over(config, sock, timeline)
            if status is not None:
                return status
        with timeline.span("process", "launch helpers"):
            launched = launch_helpers(config, timeline, fork=True)
        serve_on(sock, config, timeline, launched, ending)
    return 0


def _require_local_model(config: ServeConfig) -> None:
    """Raise the load's own error for a model on this machine that is not there, before the port is open."""
    address, digest = split_pin(config.model)
    path = local_path(address)
    if path is None or os.path.isfile(path) or any(os.path.isfile(f"{path}/{name}") for name in MODEL_SIGNS):
        return
    from ..loader.artifact import open_artifact, open_model

    source = open_model(address, config.source_options)
    try:
        open_artifact(source, digest=digest)
    finally:
        source.close()


def serve_on(
    sock: socket.socket,
    config: ServeConfig,
    timeline: Timeline,
    launched: LaunchedHelpers | None,
    ending: Ending | None = None,
) -> None:
    """Serve at a listening socket with launched helpers, until a signal. Closes the socket.

    Blocks. Raises the error that ended the instance. `ending` is notified of a failure at once; it is
    that of `teneral serve`, which shows people its load.
    """
    shows_load = ending is not None and config.log_format == "text" and sys.stderr.isatty()
    ending = ending or Ending()
    opening = None
    if launched is None or launched.load is None:
        # After the fork of the helpers: it starts a thread.
        from ..runtime.instance.loading import Opening

        opening = Opening(config, timeline, launched=launched)
    with sock, _early_page(sock, config) as early_page, _probe_socket(config) as probe_sock:
        with timeline.span("process", "import runtime"):
            from ..runtime.instance.instance import Instance
        began_s = timeline.now_s()
        _set_up_logging(config)
        with (
            Instance(
                config, timeline=timeline, launched=launched, opening=opening, server_first=True
            ) as instance,
            _standby_pool(config, instance),
        ):
            ending.has_failed = lambda: instance.failure is not None
            timeline.add("process", "start instance", began_s, timeline.now_s())
            with timeline.span("process", "import server"):
                # Here, not above: the first reads start before it is needed.
                import asyncio

                from .http.lean_aiohttp import import_web

                import_web()
                from .app import Limits, create_app, serve
            instance.kind.add_done_callback(lambda _: _collect_garbage())
            _log_ready(instance)
            limits = Limits.from_config(config)
            with timeline.span("process", "make server"):
                handler = None
                if config.handler:
                    from .function.handler import load_handler  # most servers have none

                    handler = load_handler(config.handler, max_calls=limits.max_in_flight)
                platform = platform_of(config.platform, os.environ)
                app = create_app(instance, handler=handler, limits=limits, platform=platform)
            drain_timeout_s = config.drain_timeout_s
            drain_timeout_s = platform.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
            _announce(config, sock, probe_sock, limits)
            if shows_load:
                threading.Thread(
                    target=_show_load, args=(instance,), name="teneral-progress", daemon=True
                ).start()
            try:
                more = () if probe_sock is None else (probe_sock,)
                accepted = None if early_page is None else early_page.hand_over
                failure = asyncio.run(
                    serve(app, sock, drain_timeout_s=drain_timeout_s, more_sockets=more, accepted=accepted)
                )
            finally:
                if handler is not None:
                    handler.close()
    if failure is not None:
        raise failure


def _set_up_logging(config: ServeConfig) -> None:
    import logging  # the first reads start before it is needed

    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if config.log_format == "json":
        from .http.logs import write_json  # rarely used

        write_json()
    logging.getLogger("torch").setLevel(logging.WARNING)  # at info it logs its caches at the end


def _early_page(sock: socket.socket, config: ServeConfig) -> AbstractContextManager[EarlyPage | None]:
    """The console's page until the web server is imported; a standby process has done so before."""
    if not config.console or "aiohttp.web" in sys.modules:
        return nullcontext()
    from .console.early import EarlyPage

    more_headers = "" if config.cors_origin is None else "Vary: Origin\r\n"
    return EarlyPage(sock, needs_key=config.api_key is not None, more_headers=more_headers)


def _announce(
    config: ServeConfig, sock: socket.socket, probe_sock: socket.socket | None, limits: Limits
) -> None:
    """Print the lines on stderr for the person who started the server."""
    lines = [f"{config.served_name} on http://{shown_address(sock)}"]
    if config.api_key is None and not is_loopback(sock) and not is_hosted(os.environ, config.platform):
        lines.append(OPEN_WARNING)
    most = limits.within_files(max_files()).max_connections
    if most < limits.max_connections:
        lines.append(f"{most} connections at a time, because ulimit -n is {max_files()}")
    if probe_sock is not None:
        lines.append(f"probes at port {probe_sock.getsockname()[1]}")
    for line in lines:
        # With its end in one write: other processes write there, too, and Python may not buffer.
        print(f"teneral: {line}\n", end="", file=sys.stderr, flush=True)


def _log_ready(instance: Instance) -> None:
    """Log one line once all weights are exact and requests are answered with them."""
    import logging

    once = threading.Lock()

    def log(_: object) -> None:
        if instance.state is State.READY and once.acquire(blocking=False):
            logger = logging.getLogger("teneral.serve")
            logger.info("%s is ready after %.2f s", instance.model_name, instance.timeline.now_s())

    for future in (instance.exact, instance.engine, instance.embedder, instance.onnx):
        future.add_done_callback(log)


def _show_load(instance: Instance) -> None:
    """Draw the load's progress, with its rate and the time that is left, where it takes longer than a
    moment. The body of a thread.
    """
    if instance.wait_exact(SHORT_LOAD_S):
        return
    from ..loader.tools.progress_bar import ProgressBar, TransferProgress  # for people at a terminal

    with ProgressBar("loading", started_s=instance.timeline.started_at) as bar:
        while not instance.exact.done():
            progress = instance.progress()
            done_bytes, total_bytes = progress["fetched_bytes"], progress["stored_bytes"]
            if total_bytes:
                bar.update(TransferProgress(done_bytes, total_bytes))
                if done_bytes >= total_bytes:
                    return
            instance.wait_exact(ProgressBar.redraw_s)


def _collect_garbage() -> None:
    """Enable garbage collection, off since the process began.

    Objects left by imports are never scanned: that would delay the first request by a quarter of a
    second, to free a few megabytes.
    """
    gc.freeze()
    gc.enable()


def _standby_pool(config: ServeConfig, instance: Instance) -> AbstractContextManager[None]:
    """Run the standby pool of the configuration."""
    if config.standby == 0:
        return nullcontext()
    # Few servers keep one.
    from .standby.server_pool import server_pool

    return server_pool(config, instance.wait_exact)


class Ending:
    """The flag that the process is about to end with an error, whose exit code a signal must not
    hide.
    """

    def __init__(self) -> None:
        self.has_failed: Callable[[], bool] = lambda: False


@contextmanager
def _ending_at_once() -> Iterator[Ending]:
    """Inside this context, and until the server has its own handlers, which drain, a signal ends
    the process: there is nothing to drain yet, and the loader's process ends with this one. After a
    failure the process ends by itself, with its exit code; SIGTERM then has no effect.

    Not by an exception: one that is raised while an import cleans up, or in the import of the
    user's handler, is swallowed, and the server goes on.
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
    """A second socket, for a platform that sends its probes to another port. It serves all routes,
    too: the platform controls the access to both.
    """
    if config.health_port is None or config.health_port == config.port:
        return nullcontext()
    return listen(config.host, config.health_port)


def run_standby(
    path: str,
    num_processes: int,
    *,
    reserve_bytes: int,
    base: tuple[str, SourceOptions] | None,
    report: Callable[[TeneralError], int],
) -> int:
    """`standby.pool.run_pool`, with processes that become this server."""
    from .standby.pool import run_pool

    return run_pool(
        path,
        num_processes,
        reserve_bytes=reserve_bytes,
        base=base,
        report=report,
        import_server=import_server,
        serve_on=serve_on,
    )


def import_server() -> None:
    """Import all modules of a server. Starts no thread."""
    for name in (".app", ".function.handler", *LATER):
        import_module(name, __package__)


def main(listener: int, owner: int) -> int:
    """Serve at the inherited socket `listener` until a signal, unless the process `owner` is gone.

    The program of an instance of `teneral pool run` without a standby process: it ends with the
    supervisor, even if that is killed. The configuration comes as JSON on standard input, so that
    neither its secrets nor its address are in the command line.
    """
    from .standby.server_pool import end_with_parent

    end_with_parent()
    if os.getppid() != owner:
        return 0
    # As in `teneral serve`: the server enables it once it can answer.
    gc.disable()
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # until the server has handlers of its own
    import json

    config = ServeConfig(**json.load(sys.stdin))
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    try:
        launched = launch_helpers(config, timeline, fork=True)
        serve_on(socket.socket(fileno=listener), config, timeline, launched)
    except TeneralError as error:
        print(f"teneral: {config.served_name}: {error}\n", end="", file=sys.stderr)  # as in `_announce`
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
