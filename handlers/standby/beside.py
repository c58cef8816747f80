"""A pool that a server keeps beside its own work: it begins when the weights are in, not in their way, and ends with
the server, also where that is killed.

As a program it is how that pool begins: it asks the system for a signal when the server is gone, and becomes
`teneral standby`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...loader.errors import UsageError
from ...runtime.config import ServeConfig

_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def pool_beside(config: ServeConfig, wait_exact: Callable[[], bool]) -> Iterator[None]:
    """Keep the pool that the configuration asks for from when `wait_exact` says True to the end of this context, which
    returns when the pool has ended. Raises `UsageError` where no socket is named.
    """
    if config.standby_socket is None:
        raise UsageError(
            "standby processes need a socket to wait at",
            key="standby",
            hint="Name one with --standby-socket.",
        )
    import subprocess

    begin = [sys.executable, "-m", f"{__package__}.beside", str(os.getpid())]
    command = [*begin, config.standby_socket, "--processes", str(config.standby)]
    lock = threading.Lock()  # between the pool's beginning and our end
    pools: list[subprocess.Popen[bytes]] = []
    has_ended = False

    def keep() -> None:
        if not wait_exact():
            return
        with lock:
            if has_ended:
                return
            pool = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            pools.append(pool)
        pool.wait()  # what the system takes for the server's end is that of the thread that started the pool

    keeper = threading.Thread(target=keep, name="teneral-standby", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        with lock:
            has_ended = True
        for pool in pools:
            pool.terminate()
            keeper.join()


def main(owner: str, *arguments: str) -> None:
    """Become `teneral standby` with these arguments, unless the process `owner` is gone. Does not return then."""
    end_with_parent()
    if os.getppid() == int(owner):
        command = [sys.executable, "-m", _package(), "standby", *arguments]
        os.execv(sys.executable, command)  # noqa: S606 - an argument list of our own making


def end_with_parent() -> None:
    """Have this process get SIGTERM when the thread that started it ends. The caller checks `os.getppid()` afterwards:
    the parent may be gone already. Where the system refuses it, this process ends only with a parent that ends well.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _package() -> str:
    assert __package__ is not None
    return __package__.partition(".")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
