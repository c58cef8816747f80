"""`teneral standby`: a pool of processes that have imported everything and hold no model.

One process imports, and forks the others: a fork shares the parent's memory until it writes to it.
Each forks a tokenizer of its own (for a GPU a loader, too), may allocate memory for weights ahead,
and waits at the same local socket; the one that gets an order becomes that server, and the pool
forks a replacement.

Forking is safe because the parent has one thread, ran nothing in parallel, and made no CUDA
context. So torch gets one thread before it computes anything, and numpy's own library none.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ...loader.device.detect import CPU, choose_device
from ...loader.errors import TeneralError, UsageError
from ...loader.load.launch import Prepared
from ...loader.memory.arena import Reserve
from ...loader.memory.limits import available, check_fits
from ...loader.process.cpu import has_idle_core
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from ...runtime.errors import ModelError, PortInUseError
from ...runtime.start import LaunchedHelpers, launch_helpers
from ...runtime.text.chat import ChatWorker
from ...runtime.text.launch import PreparedTokenizer
from .handover import Channel, HandoverError, Order, check_path

ServeOn = Callable[[socket.socket, ServeConfig, Timeline, LaunchedHelpers | None], None]

MAX_PROCESSES = 256
# A process that ends sooner, without an order, would probably fail again if it were forked at once.
MIN_LIFE_S = 1.0
ORDER_TIMEOUT_S = 5.0  # for a complete order
IDLE_CHECK_S = 0.05  # between checks for an idle core
# After waiting this long for an idle core, a standby starts its interpreter for chat templates anyway.
MAX_BUSY_S = 3.0


def run_pool(
    path: str,
    num_processes: int,
    *,
    reserve_bytes: int = 0,
    report: Callable[[TeneralError], int],
    import_server: Callable[[], None],
    serve_on: ServeOn,
) -> int:
    """Keep `num_processes` waiting at the socket `path` until SIGTERM or SIGINT, each with
    `reserve_bytes` allocated for weights. Returns 0.

    Processes that serve by then go on. `import_server` imports the server's modules, and `serve_on`
    is `serve.serve_on`. `report` prints the error that ended a server, and returns its exit status.
    Blocks. Raises `UsageError`, `InsufficientMemoryError`, and `PortInUseError` if there is another
    pool.
    """
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise UsageError(
            f"a standby pool has 1 to {MAX_PROCESSES} processes, not {num_processes}", key="standby"
        )
    check_fits(
        num_processes * reserve_bytes, available(), what=f"a pool of {num_processes} with memory ahead"
    )
    listener, remove_socket = _listening(check_path(path))
    with listener:
        try:
            began_s = time.monotonic()
            import_everything(import_server)
            imported_s = time.monotonic() - began_s
            gc.collect()
            # Existing objects are exempt from the forks' garbage collections, and so not copied.
            gc.freeze()
            serving = Serving(serve_on, report)
            with contextlib.closing(StandbyPool(listener, num_processes, reserve_bytes, serving)) as pool:
                pool.fill()
                print(
                    f"teneral: {num_processes} standby processes at {path} (imported in {imported_s:.1f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                pool.run()
        finally:
            remove_socket()
    return 0


def _listening(path: str) -> tuple[socket.socket, Callable[[], None]]:
    """`listen_locally`, with a function that removes its file.

    From then on a signal ends this process at once, without the socket's file, until the pool has
    handlers of its own. Not by an exception: one that is raised while an import cleans up is
    swallowed, and the pool goes on.
    """

    def remove() -> None:
        with suppress(OSError):
            if _identity(path) == bound:
                os.unlink(path)

    def end(*_: object) -> None:
        remove()
        os._exit(0)

    numbers = (signal.SIGTERM, signal.SIGINT)
    # None may come between the file and its removal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        listener = listen_locally(path)
        bound = _identity(path)
        for number in numbers:
            signal.signal(number, end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return listener, remove


def _identity(path: str) -> tuple[int, int]:
    """The identity of the file at the path itself, not of a link's target: a file put there since
    is not the pool's to remove.
    """
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def import_everything(import_server: Callable[[], None]) -> None:
    """Import everything that a server needs, without starting a thread."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # docs/decisions/0007
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would not survive the fork
    # Imports torch, the longest import.
    if choose_device("auto") != CPU:
        import torch

        torch.set_num_threads(1)
    import ssl  # noqa: F401

    import tokenizers  # noqa: F401

    from ...loader.format import checkpoint, codec, manifest_json  # noqa: F401
    from ...loader.load import child, load, process_load  # noqa: F401
    from ...loader.native.library import library
    from ...loader.sources.open import import_all
    from ...runtime import building, files, instance, weights  # noqa: F401
    from ...runtime.backends import choose  # noqa: F401
    from ...runtime.backends.native import backend, encoder  # noqa: F401
    from ...runtime.engine import embedder, engine  # noqa: F401
    from ...runtime.models import build  # noqa: F401
    from ...runtime.text import remote, settings, subset, tokenizer_child  # noqa: F401

    import_all()
    # The process that computes makes its threads.
    library()
    import_server()


def listen_locally(path: str) -> socket.socket:
    """A listening local socket for this user only. Replaces one without a listener."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        _make_room(path)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen at {path}: {error.strerror or error}",
            key="standby_socket",
            hint="Choose a path in a folder that this user can write to.",
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _make_room(path: str) -> None:
    """Remove the socket of a killed pool of this user at the path, and no other file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    # A connection to a file of any other kind is refused in the same way as one to a socket without
    # a listener.
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} exists and is not a socket of this user",
            key="standby_socket",
            hint="Choose a path without a file.",
        )
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)  # left by a killed pool
            return
    raise PortInUseError(
        f"another standby pool is at {path}", hint="Stop it, or choose another path with --standby-socket."
    )


class Serving(NamedTuple):
    """The functions by which a process of the pool serves an order."""

    serve_on: ServeOn
    report: Callable[[TeneralError], int]


class StandbyPool:
    """The forking process. Single-threaded."""

    def __init__(
        self,
        listener: socket.socket,
        num_processes: int,
        reserve_bytes: int,
        serving: Serving,
    ) -> None:
        self._serving = serving
        self._num_processes = num_processes
        self._reserve_bytes = reserve_bytes
        # Processes without an order, and the time of their start.
        self._waiting: dict[int, float] = {}
        # The forks hold the writing end: each reports its order here. They read the other pipe,
        # whose end means that this process is gone.
        self._taken, say_taken = os.pipe()
        alive, self._keep_alive = os.pipe()
        self.ends = PoolEnds(listener, say_taken, alive)

    def close(self) -> None:
        """Close the pipes: the waiting processes notice, and end. The caller keeps the listener."""
        for fd in (self._taken, self._keep_alive, self.ends.say_taken, self.ends.alive):
            os.close(fd)

    def run(self) -> None:
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: stopped.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the select below
        with wake, woken:
            signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
            try:
                while not stopped:
                    self.turn(wake)
            finally:
                # Children end after this, and their signals would be written to a closed socket.
                signal.set_wakeup_fd(-1)
        for process_id in self._waiting:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGTERM)

    def turn(self, wake: socket.socket) -> None:
        """Refill, and block until a signal has made `wake` readable or a process has taken an order."""
        self.fill()
        ready, _, _ = select.select([wake.fileno(), self._taken], [], [])
        if wake.fileno() in ready:
            wake.recv(1024)
        if self._taken in ready:
            self._forget_taken()
        self._reap()

    def fill(self) -> None:
        """Fork the missing processes."""
        while len(self._waiting) < self._num_processes:
            process_id = os.fork()
            if process_id == 0:
                os.close(self._taken)
                os.close(self._keep_alive)
                _wait_and_exit(self.ends, self._reserve_bytes, self._serving)
            self._waiting[process_id] = time.monotonic()

    def _forget_taken(self) -> None:
        for number in os.read(self._taken, 4096).split():
            self._waiting.pop(int(number), None)

    def _reap(self) -> None:
        while True:
            try:
                process_id, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process_id == 0:
                return
            since_s = self._waiting.pop(process_id, None)
            if since_s is not None and time.monotonic() - since_s < MIN_LIFE_S:
                time.sleep(MIN_LIFE_S)


class PoolEnds(NamedTuple):
    """A fork's ends of the pool's pipes, and the listener."""

    listener: socket.socket
    say_taken: int  # reports an order
    # Its end means that the pool is gone.
    alive: int


class _Ahead:
    """A server's helpers before its order.

    Forks are made at once, since they cost a few milliseconds; an interpreter for chat templates
    and memory for weights wait for an idle core, since a server that has just started needs them.
    """

    def __init__(self, reserve_bytes: int) -> None:
        uses_cpu = choose_device("auto") == CPU
        self.load = None if uses_cpu else Prepared(fork=True)
        self.tokenizer = PreparedTokenizer(files=None if self.load is None else self.load.files, fork=True)
        # Also None if the system refuses another process.
        self.chat_worker: ChatWorker | None = None
        self._began_s = time.monotonic()
        self.is_complete = False
        # Its thread begins after all forks.
        self.reserve = Reserve(reserve_bytes) if reserve_bytes and uses_cpu else None

    def complete(self) -> None:
        """Start the interpreter for chat templates if a core is idle, or none has been for `MAX_BUSY_S`."""
        if not has_idle_core() and time.monotonic() - self._began_s < MAX_BUSY_S:
            return
        self.is_complete = True
        # It is then started by the first chat.
        with suppress(ModelError):
            self.chat_worker = ChatWorker()


def _wait_and_exit(ends: PoolEnds, reserve_bytes: int, serving: Serving) -> None:
    """The whole life of a fork."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT,
            signal.SIG_IGN,
            # Ctrl-C in the pool's terminal: the pool decides when to end.
        )
        ahead = _Ahead(reserve_bytes if _has_room(reserve_bytes) else 0)
        accepted = _accept(ends.listener, ends.alive, ahead)
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


def _accept(listener: socket.socket, alive: int, ahead: _Ahead) -> tuple[Channel, Order] | None:
    """The first complete order; None if the pool is gone. Completes `ahead` meanwhile."""
    listener.setblocking(False)
    while True:
        rest_s = None if ahead.is_complete else IDLE_CHECK_S
        ready, _, _ = select.select([listener.fileno(), alive], [], [], rest_s)
        if alive in ready:
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
            channel.send({"process": os.getpid()})
            if channel.receive().get("go") is True:
                channel.settimeout(None)
                return channel, order
        if order is not None:
            order.close()
        channel.close()


def _serve(channel: Channel, order: Order, ahead: _Ahead, serving: Serving) -> int:
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
