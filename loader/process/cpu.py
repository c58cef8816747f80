"""Processor time: the cores that the container leaves this process, whether one is idle, one
function over many things in a few threads, and shorter turns of threads.

Imports next to nothing: the standard library's executors bring logging along, for which a cold
start would wait.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

CGROUP_ROOT = "/sys/fs/cgroup"
T = TypeVar("T")
R = TypeVar("R")
QUICK_S = 0.0005

_lock = threading.Lock()
_num_wanted = 0
_usual_s = 0.005


def available_cores(cgroup_root: str | os.PathLike[str] = CGROUP_ROOT) -> int:
    """Cores that this process may use: its affinity, bounded by the cgroup's CPU quota (v2, then
    v1), at least 1.

    Threads beyond the quota do not compute: they are throttled, and then a step waits for the
    slowest of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup_root)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def _quota(root: str | os.PathLike[str]) -> float | None:
    try:
        limit, period = _read(root, "cpu.max").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass  # no cgroup v2, or no controller here: look for v1
    try:
        limit_us = int(_read(root, "cpu", "cpu.cfs_quota_us"))
        period_us = int(_read(root, "cpu", "cpu.cfs_period_us"))
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def _read(root: str | os.PathLike[str], *names: str) -> str:
    with open(os.path.join(root, *names), "rb") as file:
        return file.read().decode("ascii")


def has_idle_core() -> bool:
    """True if fewer threads run or could run on this machine, the calling one included, than there
    are cores, or the system does not say.
    """
    return _num_running() <= available_cores()


def _num_running() -> int:
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read(100).split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def parallel_map(function: Callable[[T], R], things: Iterable[T], *, num_threads: int) -> list[R]:
    """The results, in the order of the things. Blocks; this thread is one of those that work.

    Raises the error of the first thing that has one, when all calls that were begun have ended; no
    more are begun then.
    """
    given = list(things)
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    lock = threading.Lock()
    numbers = iter(range(len(given)))

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(given[number])
            except Exception as error:  # noqa: BLE001 - raised below
                errors[number] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, len(given)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(given))]


@contextmanager
def quick_turns() -> Iterator[None]:
    """Threads of this process take turns every 0.5 ms while at least one caller is inside."""
    global _num_wanted, _usual_s  # noqa: PLW0603 - the interpreter has one interval
    with _lock:
        _num_wanted += 1
        if _num_wanted == 1:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(QUICK_S, _usual_s))
    try:
        yield
    finally:
        with _lock:
            _num_wanted -= 1
            if _num_wanted == 0:
                sys.setswitchinterval(_usual_s)
