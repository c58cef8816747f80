"""Processor time: the cores that the container leaves this process, and whether one is idle."""

from __future__ import annotations

import math
import os

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
