"""`teneral standby`: a pool of processes that have imported everything and hold no model of their own.

One process imports, and forks the others: a fork shares the parent's memory until it writes to it.
Each forks a tokenizer of its own (for a GPU a loader, too), may allocate memory for weights ahead,
and waits at the same local socket; the one that gets an order becomes that server, and the pool
forks a replacement (`waiting.py`). The weights of a base may be in memory once for all of them:
while they are loaded, by a process of their own, the pool waits without, and its processes are
replaced when they are there.

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
from typing import TYPE_CHECKING, Any

from ...loader.device.detect import CPU, choose_device
from ...loader.errors import TeneralError, UsageError
from ...loader.memory.limits import available, check_fits
from ...runtime.errors import PortInUseError
from .handover import check_path
from .waiting import Equipment, PoolEnds, ServeOn, Serving, StatusPage, wait_and_exit

if TYPE_CHECKING:
    from ...loader.sources.base import SourceOptions
    from .base import PoolBase

MAX_PROCESSES = 256
# A process that ends sooner, without an order, would probably fail again if it were forked at once.
MIN_LIFE_S = 1.0


def run_pool(
    path: str,
    num_processes: int,
    *,
    reserve_bytes: int = 0,
    base: tuple[str, SourceOptions] | None = None,
    report: Callable[[TeneralError], int],
    import_server: Callable[[], None],
    serve_on: ServeOn,
) -> int:
    """Keep `num_processes` waiting at the socket `path` until SIGTERM or SIGINT, each with
    `reserve_bytes` allocated for weights, and all of them with the weights at the address `base` once
    these are loaded. On SIGHUP the base is looked for again. Returns 0.

    Processes that serve by then go on. `import_server` imports the server's modules, and `serve_on`
    is `serve.serve_on`. `report` prints the error that ended a server, and returns its exit status.
    Blocks. Raises `UsageError`, `InsufficientMemoryError`, `PortInUseError` if there is another
    pool, and the error of the base's first load.
    """
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise UsageError(
            f"a standby pool has 1 to {MAX_PROCESSES} processes, not {num_processes}", key="standby"
        )
    check_fits(
        num_processes * reserve_bytes, available(), what=f"a pool of {num_processes} with memory ahead"
    )
    if base is not None and choose_device("auto") != CPU:
        raise UsageError("a standby pool holds a base for the CPU, and here is a GPU", key="base")
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
            held = None
            if base is not None:
                # numpy, which comes with it, is imported by now as this process needs it.
                from .base import PoolBase

                held = PoolBase(*base)
            with contextlib.closing(
                StandbyPool(listener, num_processes, reserve_bytes, serving, held)
            ) as pool:
                pool.fill()
                print(
                    f"teneral: {num_processes} standby processes at {path} (imported in {imported_s:.1f} s)\n",
                    end="",  # one write: other processes write there, too
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

    from ...loader.format import checkpoint, fill, manifest_json  # noqa: F401
    from ...loader.load import child, load, process_load  # noqa: F401
    from ...loader.load.targets import shared  # noqa: F401
    from ...loader.native.library import library
    from ...loader.sources.open import import_all
    from ...runtime import files, metrics, weights  # noqa: F401
    from ...runtime.backends import choose  # noqa: F401
    from ...runtime.backends.native import backend, encoder  # noqa: F401
    from ...runtime.engine import embedder, engine  # noqa: F401
    from ...runtime.instance import exactness, instance, loading, model  # noqa: F401
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


class StandbyPool:
    """The forking process. Single-threaded."""

    def __init__(
        self,
        listener: socket.socket,
        num_processes: int,
        reserve_bytes: int,
        serving: Serving,
        base: PoolBase | None = None,
    ) -> None:
        self._serving = serving
        self._num_processes = num_processes
        self._reserve_bytes = reserve_bytes
        self._base = base
        # Processes without an order, and the time of their start.
        self._waiting: dict[int, float] = {}
        self._taken_processes: set[int] = set()
        # The forks hold the writing end: each reports its order here. They read the other pipe,
        # whose end means that this process is gone.
        self._taken, say_taken = os.pipe()
        alive, self._keep_alive = os.pipe()
        self.ends = PoolEnds(listener, say_taken, alive, StatusPage())

    def close(self) -> None:
        """Close the pipes: the waiting processes notice, and end. No signal would do: one of them may have taken an
        order by now. The caller keeps the listener.
        """
        if self._base is not None:
            self._base.close()
        for fd in (self._taken, self._keep_alive, self.ends.say_taken, self.ends.alive):
            os.close(fd)

    def run(self) -> None:
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        stopped: list[int] = []
        asked_again: list[bool] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: stopped.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the select below
        if self._base is not None:
            signal.signal(signal.SIGHUP, lambda *_: asked_again.append(True))
        with wake, woken:
            signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
            try:
                self._reap()  # those that ended before their signal could wake this process
                while not stopped:
                    self.turn(wake)
                    if asked_again and self._base is not None and not self._base.is_loading:
                        asked_again.clear()
                        self._base.load()
            finally:
                # Children end after this, and their signals would be written to a closed socket.
                signal.set_wakeup_fd(-1)

    def turn(self, wake: socket.socket) -> None:
        """Refill, and block until a signal has made `wake` readable, a process has taken an order, or
        the base is there. Raises the error of its first load.
        """
        self.fill()
        loading = () if self._base is None or not self._base.is_loading else (self._base.fileno(),)
        ready, _, _ = select.select([wake.fileno(), self._taken, *loading], [], [])
        if wake.fileno() in ready:
            wake.recv(1024)
        if self._taken in ready:
            self._note_taken()
        if self._base is not None and not set(loading).isdisjoint(ready) and self._base.take():
            self._replace_waiting()
        self._reap()

    def fill(self) -> None:
        """Fork the missing processes."""
        equipment = Equipment(self._reserve_bytes, None if self._base is None else self._base.held)
        while len(self._waiting) < self._num_processes:
            process_id = os.fork()
            if process_id == 0:
                os.close(self._taken)
                os.close(self._keep_alive)
                if self._base is not None:
                    self._base.forget_loading()
                wait_and_exit(self.ends, equipment, self._serving)
            self._waiting[process_id] = time.monotonic()
        self.ends.page.write(self.status())

    def status(self) -> dict[str, Any]:
        """The figures of the pool, JSON-ready."""
        return {
            "pool": os.getpid(),
            "waiting": len(self._waiting),
            "serving": len(self._taken_processes),
            "memory_ahead_bytes": self._reserve_bytes,
            "base": None if self._base is None else self._base.status(),
        }

    def _replace_waiting(self) -> None:
        """End the processes without an order, none of which is cut off in taking one, for others with
        the new base.
        """
        os.close(self._keep_alive)
        os.close(self.ends.alive)
        alive, self._keep_alive = os.pipe()
        self.ends = self.ends._replace(alive=alive)
        self._waiting.clear()

    def _note_taken(self) -> None:
        for number in map(int, os.read(self._taken, 4096).split()):
            self._waiting.pop(number, None)
            self._taken_processes.add(number)

    def _reap(self) -> None:
        while True:
            try:
                process_id, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process_id == 0:
                return
            self._taken_processes.discard(process_id)
            since_s = self._waiting.pop(process_id, None)
            if since_s is not None and time.monotonic() - since_s < MIN_LIFE_S:
                time.sleep(MIN_LIFE_S)
