"""An application served on open sockets until a signal, and to other parts of the same process.

The caller opens the sockets (`sockets.listen`) before anything heavy is imported: clients that come early wait in the
backlog. `serving_inside` lets events that arrive by another way than HTTP go through everything that an HTTP request
does, over a local socket in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ...loader.errors import TeneralError, UsageError
from .limits import IDLE_CONNECTION_S, MAX_HEADER_BYTES, MAX_HEADERS, MAX_REQUEST_LINE_BYTES
from .service import SERVICE, logger

if TYPE_CHECKING:
    from aiohttp import ClientSession

BACKLOG = 1024  # connections that the kernel takes while the event loop is busy
# An instance may have failed before anybody was let in. Whoever waits in the backlog is told so, not reset.
FAILED_GRACE_S = 0.25
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    app: web.Application,
    sock: socket.socket,
    *,
    drain_timeout_s: float = 8.0,
    stop: asyncio.Event | None = None,
    more_sockets: Sequence[socket.socket] = (),
) -> TeneralError | None:
    """Serve until SIGTERM, SIGINT, `stop`, or the end of the instance; then drain. Closes the sockets, not the
    instance that the application was made with. Returns what the instance failed with, None when it did not.

    Draining: /readyz turns 503 at once and new work gets 503; what runs has `drain_timeout_s` to finish and
    is then ended, each stream with an error event. A second signal ends the process at once, by that signal.
    Signals are handled only when this runs in the main thread.
    """
    service = app[SERVICE]
    stop = stop or asyncio.Event()
    service.slot.watch(stop.set)
    runner = web.AppRunner(
        app,
        access_log=None,  # `edge` writes one
        logger=_wire_logger(),
        handler_cancellation=True,  # a client that goes away cancels its handler, and with it its generations
        keepalive_timeout=IDLE_CONNECTION_S,
        auto_decompress=False,  # compressed bodies are refused, so nothing can be a bomb
        max_line_size=MAX_REQUEST_LINE_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        shutdown_timeout=0.5,  # after the drain only answers on their way out are left
    )
    await runner.setup()
    listeners: list[asyncio.Server] = []
    try:
        with _signals(stop):
            factory = service.connections.guarding(cast(Callable[[], Any], runner.server))
            for each in (sock, *more_sockets):
                listener = await asyncio.get_running_loop().create_server(factory, sock=each, backlog=BACKLOG)
                listeners.append(listener)
            await stop.wait()
            if service.instance.failure is not None:
                await asyncio.sleep(FAILED_GRACE_S)
            logger.info("draining: %d requests in work, %g s", len(service.in_flight), drain_timeout_s)
            deadline_s = time.monotonic() + drain_timeout_s
            await service.in_flight.drain(drain_timeout_s)
            await asyncio.to_thread(service.instance.save_snapshot, deadline_s - time.monotonic())
            return service.instance.failure
    finally:
        for listener in listeners:
            listener.close()
        await runner.cleanup()
        await service.slot.close()


def _wire_logger() -> logging.Logger:
    """What aiohttp logs to."""
    logger = logging.getLogger("teneral.http.wire")
    logger.addFilter(_tell_bad_requests_briefly)
    return logger


def _tell_bad_requests_briefly(record: logging.LogRecord) -> bool:
    """aiohttp logs a client that does not speak HTTP as an error with a traceback. To a server it is neither: any
    scanner of ports would fill its log.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno = min(record.levelno, logging.INFO)
        record.levelname = logging.getLevelName(record.levelno)
        record.msg = f"{record.getMessage()}: {' '.join(error.message.split())[:200]}"
        record.args, record.exc_info = (), None
    return True


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """While in here the first signal sets `stop`, and the second one does what it does by default. A signal that comes
    when `stop` is set for another reason, such as a load that failed, is the first one.
    """
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)
        stop.set()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
    except (RuntimeError, ValueError):  # not in the main thread: whoever runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


BASE_URL = "http://inside"  # requests name their path behind it


@asynccontextmanager
async def serving_inside(app: web.Application) -> AsyncIterator[ClientSession]:
    """While in here the session's requests reach the application. Any number at a time; no time-outs but the
    application's own; nothing is decompressed. `UsageError` where no temporary folder can be made.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="teneral-")
    except OSError as error:
        raise UsageError(
            f"a temporary folder is needed for a local socket: {error.strerror or error}",
            key="TMPDIR",
            hint="Name a folder that may be written to with TMPDIR.",
        ) from error
    with folder as place:
        path = str(Path(place) / "http.sock")
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=MAX_REQUEST_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            from aiohttp import (  # servers without events do without
                ClientSession,
                ClientTimeout,
                UnixConnector,
            )

            async with ClientSession(
                BASE_URL,
                connector=UnixConnector(path, limit=0),
                timeout=ClientTimeout(total=None),
                auto_decompress=False,
            ) as session:
                yield session
        finally:
            await runner.cleanup()
