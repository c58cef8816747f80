"""The life of one process of a standby pool: it waits at the pool's socket for an order, with a
tokenizer and perhaps memory of its own, and becomes that server.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.device.detect import CPU, choose_device
from ...loader.errors import TeneralError
from ...loader.load.launch import Prepared
from ...loader.memory.arena import Reserve
from ...loader.memory.limits import available
from ...loader.process.cpu import has_idle_core
from ...loader.process.helper import HelperProcess
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from ...runtime.errors import ModelError
from ...runtime.instance.helpers import LaunchedHelpers, launch_helpers
from ...runtime.text.chat import ChatWorker
from ...runtime.text.launch import PreparedTokenizer
from .handover import Channel, HandOver, HandoverError

if TYPE_CHECKING:
    from ...loader.load.targets.shared import SharedBase

ServeOn = Callable[[socket.socket, ServeConfig, Timeline, LaunchedHelpers | None], None]

ORDER_TIMEOUT_S = 5.0  # for a complete order
IDLE_CHECK_S = 0.05  # between checks for an idle core
# After waiting this long for an idle core, a standby starts its interpreter for chat templates anyway.
MAX_BUSY_S = 3.0
MAX_STATUS_BYTES = 16 << 10


class Serving(NamedTuple):
    """The functions by which a process of the pool serves an order."""

    serve_on: ServeOn
    report: Callable[[TeneralError], int]


class PoolEnds(NamedTuple):
    """A fork's ends of the pool's pipes, the listener, and the page with the pool's status."""

    listener: socket.socket
    say_taken: int  # reports an order
    # Its end means that the pool is gone, or has replaced its waiting processes.
    alive: int
    page: StatusPage


class StatusPage:
    """A page of memory with the pool's status: the pool writes it, and its forks send it to clients."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MAX_STATUS_BYTES)  # shared by forks

    def write(self, status: dict[str, Any]) -> None:
        data = json.dumps(status).encode()[: MAX_STATUS_BYTES - 1] + b"\n"
        self._memory[: len(data)] = data

    def read(self) -> dict[str, Any]:
        """The status; empty where it was just being written, more than once in a row."""
        for _ in range(3):
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(self._memory[: self._memory.find(b"\n")])
                return found
            time.sleep(1e-3)
        return {}


class Equipment(NamedTuple):
    """The pool's memory for each of its processes: bytes that it takes ahead, and the base of all."""

    reserve_bytes: int = 0
    base: SharedBase | None = None


class _Ahead:
    """A server's helpers before its order.

    Forks are made at once, since they cost a few milliseconds; an interpreter for chat templates
    and memory for weights wait for an idle core, since a server that has just started needs them.
    """

    def __init__(self, equipment: Equipment) -> None:
        self.base = equipment.base
        uses_cpu = choose_device("auto") == CPU
        self.load = None if uses_cpu else Prepared(fork=True)
        self.tokenizer = PreparedTokenizer(
            files=None if self.load is None else self.load.files,
            fork=True,
            held=None if self.base is None else self.base.files,
        )
        # Also None if the system refuses another process.
        self.chat_worker: ChatWorker | None = None
        self._began_s = time.monotonic()
        self.is_complete = False
        reserve_bytes = equipment.reserve_bytes if _has_room(equipment.reserve_bytes) else 0
        # Its thread begins after all forks.
        self.reserve = Reserve(reserve_bytes) if reserve_bytes and uses_cpu else None

    @property
    def helpers(self) -> tuple[HelperProcess, ...]:
        """Those that no server can do without. Their sockets are readable when they have ended."""
        return (self.tokenizer.process, *(() if self.load is None else (self.load.process,)))

    def is_whole(self) -> bool:
        """False if a helper has ended, such as one that the system killed for memory. The chat renderer is left out: a
        server without it starts another.
        """
        if self.chat_worker is not None and self.chat_worker.process.poll() is not None:
            self.chat_worker.end()
            self.chat_worker = None
        return not any(helper.has_ended for helper in self.helpers)

    def complete(self) -> None:
        """Start the interpreter for chat templates if a core is idle, or none has been for `MAX_BUSY_S`."""
        if not has_idle_core() and time.monotonic() - self._began_s < MAX_BUSY_S:
            return
        self.is_complete = True
        # It is then started by the first chat.
        with suppress(ModelError):
            self.chat_worker = ChatWorker()


def wait_and_exit(ends: PoolEnds, equipment: Equipment, serving: Serving) -> None:
    """The whole life of a fork."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Ctrl-C in the pool's terminal: the pool decides when to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ahead = _Ahead(equipment)
        accepted = _accept(ends, ahead)
        if accepted is not None:
            channel, order = accepted
            os.write(ends.say_taken, b"%d\n" % os.getpid())
            for fd in (ends.listener.detach(), ends.say_taken, ends.alive):
                os.close(fd)
            status = _serve(channel, order, ahead, serving)
    except BaseException:  # noqa: BLE001 - reported, and then the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _has_room(reserve_bytes: int) -> bool:
    """True if as much memory again would remain for the running processes."""
    left = available()
    return left is None or left.size_bytes >= 2 * reserve_bytes


def _accept(ends: PoolEnds, ahead: _Ahead) -> tuple[Channel, HandOver] | None:
    """The first complete order; None if the pool is gone, or a helper: then another process of the pool takes the
    order. Completes `ahead` meanwhile.
    """
    listener, alive = ends.listener, ends.alive
    sockets = [helper.socket.fileno() for helper in ahead.helpers]
    listener.setblocking(False)
    while True:
        rest_s = None if ahead.is_complete else IDLE_CHECK_S
        ready, _, _ = select.select([listener.fileno(), alive, *sockets], [], [], rest_s)
        if alive in ready:
            return None
        # Before a client is accepted: it waits for the next process then, and notices nothing.
        if ready and (not set(ready).isdisjoint(sockets) or not ahead.is_whole()):
            text = f"the standby process {os.getpid()} has lost a helper, and is replaced"
            print(f"teneral: {text}\n", end="", file=sys.stderr, flush=True)
            return None
        if not ready:
            ahead.complete()
            continue
        try:
            connected, _ = listener.accept()
        except BlockingIOError:
            continue  # another process was faster
        connected.setblocking(True)
        try:
            channel = Channel(connected)
        except HandoverError:
            continue
        # A probe, a client that gave up, or one that violates the protocol has no effect.
        order = None
        with suppress(HandoverError):
            channel.settimeout(ORDER_TIMEOUT_S)
            order = channel.receive_order()
            if order is None:
                channel.send(ends.page.read())
                channel.close()
                continue
            channel.send({"process": os.getpid()})
            if channel.receive().get("go") is True:
                channel.settimeout(None)
                return channel, order
        if order is not None:
            order.close()
        channel.close()


def _serve(channel: Channel, order: HandOver, ahead: _Ahead, serving: Serving) -> int:
    """Serve the order. Returns the exit status after sending it."""
    # The client forwards its signals, and its terminal's.
    os.setsid()
    for place, fd in enumerate(order.streams):
        os.dup2(fd, place)
        os.close(fd)
    order.context.apply()
    _end_with_client(channel)
    status = 0
    try:
        timeline = Timeline(started_at=order.started_at)
        timeline.mark("process", "port open")
        timeline.mark("process", "taken over by a standby")
        launched = launch_helpers(
            order.config,
            timeline,
            prepared=ahead.load,
            tokenizer=ahead.tokenizer,
            chat_worker=ahead.chat_worker,
            reserve=ahead.reserve,
            shared=ahead.base,
            context=order.context,
        )
        serving.serve_on(socket.socket(fileno=order.listener), order.config, timeline, launched)
    except TeneralError as error:
        status = serving.report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send({"status": status})
    return status


def _end_with_client(channel: Channel) -> None:
    """Drain when the client is killed, as when it is asked to end."""
    import threading

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN | select.POLLHUP)
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="teneral-standby", daemon=True).start()
