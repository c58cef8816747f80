"""How many cores this container may use of its host. (Memory is in `memory.py`.)"""

from __future__ import annotations

import math
import os

CGROUP_ROOT = "/sys/fs/cgroup"


def available_cores(cgroup_root: str | os.PathLike[str] = CGROUP_ROOT) -> int:
    """Cores that this process may use: its affinity, bounded by the cgroup's CPU quota (v2, then v1), at
    least 1.

    Threads beyond the quota do not compute: they are throttled, and then a step waits for the slowest of
    them.
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
