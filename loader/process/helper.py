"""Helper processes: each serves the process that launched it over a private socket, and ends when
that does.

What must not wait for this process's GIL runs in one: the loader, the tokenizer. It is started by
forking where that is safe (it has an interpreter and our modules already), else as a fresh
interpreter. Either way the module that it runs has a `main(socket_fd, *fds)`, called with the
numbers of the open files that it is given, and is to end when the socket does. Should it be busy or
stopped when its owner ends, the system kills it (`LifeLine`).

It does not know the messages on the socket.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess


# What a helper's reads and writes raise then.
OWNER_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


class ProcessLimits(NamedTuple):
    """The umask, resource limits, niceness and cores that a process hands down to those that it
    starts.
    """

    umask: int
    resources: dict[str, tuple[int, int]]  # name without RLIMIT_ → soft and hard
    niceness: int
    cores: tuple[int, ...]

    @classmethod
    def current(cls) -> ProcessLimits:
        """This process's. For a process with one thread: it changes the umask for a moment."""
        import resource  # few hand anything down

        umask = os.umask(0o077)
        os.umask(umask)
        resources = {
            name.removeprefix("RLIMIT_"): resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        }
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return cls(umask, resources, niceness, tuple(sorted(os.sched_getaffinity(0))))

    def take(self) -> None:
        """Have these be the process's own, as far as the system lets it: a hard limit is not
        raised, nor a niceness lowered, without the privilege.
        """
        import resource

        os.umask(self.umask)
        for name, (soft, hard) in self.resources.items():
            number = getattr(resource, f"RLIMIT_{name}", None)
            if number is None:
                continue
            try:
                resource.setrlimit(number, (soft, hard))
            except (OSError, ValueError):
                _, own = resource.getrlimit(number)
                with suppress(OSError, ValueError):
                    resource.setrlimit(number, (_lower(soft, own), own))
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with suppress(OSError):
            os.sched_setaffinity(0, self.cores)


def _lower(first: int, second: int) -> int:
    """The lower one of two limits, of which -1 is none."""
    return max(first, second) if -1 in (first, second) else min(first, second)


class ProcessContext(NamedTuple):
    """The environment, folder and limits of a process, for a helper that another process started
    ahead for it.
    """

    environment: dict[str, str]  # has secrets
    folder: str
    limits: ProcessLimits | None = None  # None: the process keeps its own

    def __repr__(self) -> str:
        return f"ProcessContext({len(self.environment)} variables, {self.folder!r})"

    def apply(self) -> None:
        """Have this process's environment, folder and limits be these. Raises `OSError` where the
        folder is gone.
        """
        if self.limits is not None:
            self.limits.take()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)


class LifeLine:
    """A pipe that kills a process when this one ends, however both of them are by then: also where
    either was stopped.

    The kernel sends SIGKILL to the pipe's owner when the last writing end is closed, as it sends
    SIGIO elsewhere. It does not depend on the thread that started the process, as a parent's death
    signal does. Where a system does not know it, a helper still sees the end of its socket.
    """

    _is_open = False

    def __init__(self) -> None:
        """`theirs` is for the process to inherit; it need do nothing with it."""
        self.theirs, self._ours = os.pipe()
        self._is_open = True

    def __del__(self) -> None:
        self.close()

    def hold(self, pid: int) -> None:
        """From now on the process, which has inherited `theirs`, ends with this one."""
        if sys.platform == "linux":
            with suppress(OSError):
                fcntl.fcntl(self.theirs, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(self.theirs, fcntl.F_SETOWN, pid)
                flags = fcntl.fcntl(self.theirs, fcntl.F_GETFL)
                fcntl.fcntl(self.theirs, fcntl.F_SETFL, flags | os.O_ASYNC)

    def given(self) -> None:
        """`theirs` was inherited, or will not be: it is closed here."""
        os.close(self.theirs)

    def close(self) -> None:
        """Kill the process, if it is there. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._ours)


class HelperProcess:
    """`socket` is this side's end, and the caller's to close."""

    def __init__(self, module: str, *, fds: Sequence[int] = (), fork: bool = False) -> None:
        """Start `main` of the package's `module`, such as ".loader.load.child". Returns at once.

        `fds` stay the caller's; the helper has copies. `fork` allows forking, and is for a process
        that knows itself to hold nothing that must not be held twice; where there are threads
        already, it is not done even so. Raises `OSError` when the system refuses another process.
        """
        self.socket, theirs = socket.socketpair()
        self._life = LifeLine()
        with theirs:
            try:
                self._process: _Fork | subprocess.Popen[bytes] = (
                    _Fork(module, theirs, fds, self._life.theirs)
                    if fork and _is_single_threaded()
                    else _spawn(module, (theirs.fileno(), *fds), self._life.theirs)
                )
                self._life.hold(self._process.pid)
            except OSError:
                self.socket.close()
                self._life.close()
                raise
            finally:
                self._life.given()

    def wait(self) -> int:
        """Block until it has ended; its exit status, or minus the signal that killed it."""
        status = self._process.wait()
        self._life.close()
        return status

    @property
    def has_ended(self) -> bool:
        """True if it has, also before it was waited for."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """End it now, if it has not ended. It is still to be waited for."""
        self._process.kill()

    def forget(self) -> None:
        """For a fork of the process that launched it: close the fork's copies. The helper goes on."""
        self.socket.close()
        self._life.close()

    @property
    def pid(self) -> int:
        return self._process.pid


class _Fork:
    """A fork of this process that runs a module's `main`; waited for and killed as
    `subprocess.Popen` is.
    """

    def __init__(self, module: str, theirs: socket.socket, fds: Sequence[int], life_fd: int) -> None:
        self._lock = threading.Lock()  # between waiting for it and killing it
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _serve_and_exit(module, theirs, fds, life_fd)

    def wait(self) -> int:
        # The part that may last is not under the lock. Where another thread has the status by now,
        # or the system keeps none because this process ignores SIGCHLD, there is nothing to wait
        # for.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            if self._status is None:
                try:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    self._status = 0
            return self._status

    def kill(self) -> None:
        with self._lock:
            if self._status is None:  # so its number is not another's by now
                try:
                    os.kill(self.pid, signal.SIGKILL)
                except ProcessLookupError:
                    return


def _serve_and_exit(module: str, theirs: socket.socket, fds: Sequence[int], life_fd: int) -> None:
    """The fork's whole life: nothing of it may return into the code that forked."""
    status = 1
    try:
        # Ctrl-C reaches the whole group: the owner decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # It must not hold what the owner thinks that it has closed.
        _close_all_but(0, 1, 2, theirs.fileno(), *fds, life_fd)
        name = _package() + module
        __import__(name)
        sys.modules[name].main(theirs.fileno(), *fds)
        status = 0
    except OWNER_GONE:
        status = 1
    except BaseException:  # noqa: BLE001 - printed, and then the process is over
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the folder's own
                os.close(int(name))


def _spawn(module: str, fds: Sequence[int], life_fd: int) -> subprocess.Popen[bytes]:
    import subprocess  # 10 ms that a fork need not pay
    from pathlib import Path

    # The helper must find this very package, wherever this process found it.
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", _package() + module, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=(*fds, life_fd),
        env=os.environ | {"PYTHONPATH": path},
    )


def _package() -> str:
    return __name__.partition(".")[0]


def _is_single_threaded() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
