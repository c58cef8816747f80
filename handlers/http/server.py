"""The serving of an application on open sockets until a signal, and to other parts of the same
process.

The caller opens the sockets (`limits.listen`) before anything heavy is imported: early clients
wait in the backlog. `serving_inside` sends events that did not arrive by HTTP through all steps of
an HTTP request, over a local socket in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from ...loader.errors import TeneralError, UsageError
from .connections import app_runner
from .service import SERVICE, Service, logger

if TYPE_CHECKING:
    from aiohttp import ClientSession

BACKLOG = 1024  # connections that the kernel accepts while the event loop is busy
# An instance may have failed before any client was accepted. Clients in the backlog get an error,
# not a reset.
FAILED_GRACE_S = 0.25
# Clients of the backlog are accepted within the first, and their requests read within the second. A
# request that needs the model says so sooner.
BACKLOG_S = 0.01
FIRST_REQUESTS_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Gives accepted connections, each with the rest of an answer that is to be sent first. Its argument counts a request
# that was answered before: path, status, seconds.
Accepted = Callable[[Callable[[str, int, float], None]], Iterable[tuple[socket.socket, bytes]]]


async def serve(
    app: web.Application,
    sock: socket.socket,
    *,
    drain_timeout_s: float = 8.0,
    stop: asyncio.Event | None = None,
    more_sockets: Sequence[socket.socket] = (),
    accepted: Accepted | None = None,
) -> TeneralError | None:
    """Serve until SIGTERM, SIGINT, `stop`, or the end of the instance; then drain.

    `accepted` is called when connections can be served, and has those that came before. Closes the
    sockets, not the application's instance. Returns the instance's failure, None if it did not
    fail.

    Draining: /readyz turns 503 at once and new work gets 503; running requests have
    `drain_timeout_s` to finish and are then ended, each stream with an error event. A second signal
    ends the process at once, by that signal. Signals are handled only in the main thread.
    """
    service = app[SERVICE]
    timeline = service.instance.timeline
    began_s = timeline.now_s()
    stop = stop or asyncio.Event()
    service.slot.watch(stop.set)
    runner = app_runner(app)
    await runner.setup()
    listeners: list[asyncio.Server] = []
    try:
        with _signals(stop):
            make = cast(Callable[[], Any], runner.server)
            if accepted is not None:
                await _adopt(accepted, service, make)
            factory = service.connections.guarding(make)
            for each in (sock, *more_sockets):
                listener = await asyncio.get_running_loop().create_server(factory, sock=each, backlog=BACKLOG)
                listeners.append(listener)
            timeline.add("process", "start server", began_s, timeline.now_s())
            asyncio.get_running_loop().call_later(BACKLOG_S, _share_cores, service)
            await stop.wait()
            if service.instance.failure is None:
                logger.info(
                    "draining: %d requests in progress, %g s", len(service.in_flight), drain_timeout_s
                )
            else:  # there is nothing to finish, and the failure says why
                await asyncio.sleep(FAILED_GRACE_S)
            deadline_s = time.monotonic() + drain_timeout_s
            await service.in_flight.drain(drain_timeout_s)
            await asyncio.to_thread(service.instance.save_snapshot, deadline_s - time.monotonic())
            return service.instance.failure
    finally:
        for listener in listeners:
            listener.close()
        await runner.cleanup()
        await service.slot.close()


async def _adopt(accepted: Accepted, service: Service, make: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    for connection, unsent in accepted(service.metrics.request_ended):
        try:
            await loop.connect_accepted_socket(service.connections.guarding(make, unsent), connection)
        except OSError:
            connection.close()  # the client is gone


def _share_cores(service: Service) -> None:
    """The server can answer: let the model's build and its load take the cores, at once or when the
    requests that have waited for the server were read.
    """
    full_speed = service.instance.full_speed
    if len(service.connections):
        asyncio.get_running_loop().call_later(FIRST_REQUESTS_S, full_speed.set)
    else:
        full_speed.set()


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """A context in which the first signal sets `stop`, and the second one has its default effect. A
    signal after `stop` was set for another reason, such as a failed load, counts as the first.
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
    # Not in the main thread: the caller handles signals.
    except (RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


SOCKET_PREFIX = "teneral-inside-"  # of the folder with the socket
# Prefix of the requests' paths.
BASE_URL = "http://inside"


@asynccontextmanager
async def serving_inside(app: web.Application) -> AsyncIterator[ClientSession]:
    """A context with a session whose requests reach the application. Any number at a time; no
    time-outs except the application's own; nothing is decompressed. Raises `UsageError` without a
    temporary folder.
    """
    from ...loader.process.scratch import ScratchFolder, remove_abandoned  # of servers with events

    try:
        folder = ScratchFolder(SOCKET_PREFIX)
        remove_abandoned(SOCKET_PREFIX)
    except OSError as error:
        raise UsageError(
            f"a temporary folder is needed for a local socket: {error.strerror or error}",
            key="TMPDIR",
            hint="Set TMPDIR to a writable folder.",
        ) from error
    with folder:
        path = str(folder.path / "http.sock")
        runner = app_runner(app)
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            from aiohttp import (  # servers without events do not need it
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
