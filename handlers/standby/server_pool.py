"""A server's own standby pool: it starts once the weights are loaded, to not compete with them, and
ends with the server, even if that is killed.

Run as a program, this module starts that pool: it requests a signal for the server's end, and
becomes `teneral standby`.
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
def server_pool(config: ServeConfig, wait_exact: Callable[[], bool]) -> Iterator[None]:
    """Keep the configured pool from when `wait_exact` returns True to the end of this context,
    which waits for the pool's end.

    Raises `UsageError` without a configured socket.
    """
    if config.standby_socket is None:
        raise UsageError(
            "standby processes need a socket to wait at",
            key="standby",
            hint="Name one with --standby-socket.",
        )
    import subprocess

    begin = [sys.executable, "-m", f"{__package__}.server_pool", str(os.getpid())]
    command = [*begin, config.standby_socket, "--processes", str(config.standby)]
    lock = threading.Lock()  # held while starting the pool, and at the end
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
        # The parent-death signal is tied to the thread that started the pool, so it must stay
        # alive.
        pool.wait()

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
    """Become `teneral standby` with these arguments, and do not return, unless the process `owner`
    is gone.
    """
    end_with_parent()
    if os.getppid() == int(owner):
        command = [sys.executable, "-m", _package(), "standby", *arguments]
        os.execv(sys.executable, command)  # noqa: S606 - an argument list of our own


def end_with_parent() -> None:
    """Have this process get SIGTERM when the thread that started it ends.

    The caller checks `os.getppid()` afterwards: the parent may be gone already. If the system
    refuses, this process ends only with a parent that ends properly.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _package() -> str:
    assert __package__ is not None
    return __package__.partition(".")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
