"""Processor time: the cores that the container leaves this process, and how often its threads take
turns.

A thread that comes back from decoding, or from the device, waits up to the switch interval for the
interpreter's lock: 5 ms by default, in which a link brings several images. The interval belongs to
the process, so its users are counted.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CGROUP_ROOT = "/sys/fs/cgroup"


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


QUICK_S = 0.0005

_lock = threading.Lock()
_num_wanted = 0
_usual_s = 0.005


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
