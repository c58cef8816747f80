"""The machine's load, and the bounds that scale with it.

A bound on waiting exists to end a hang, so it must never end a test that the machine merely computes slowly. Bounds are
written for a quiet machine and stretched by how many tasks share a core.
"""

from __future__ import annotations

import os

MAX_SLOWDOWN = 20.0  # a hang still ends, on any machine
MIN_PATIENCE = 4.0  # load rises later than bounds are made, and is averaged over a minute


def slowdown() -> float:
    """How many times longer computing takes than on a quiet machine: tasks a core, over the last minutes."""
    return min(MAX_SLOWDOWN, max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1)))


def patience_s(quiet_s: float) -> float:
    """How long to wait for something that takes less than `quiet_s` on a quiet machine."""
    return quiet_s * max(MIN_PATIENCE, 2 * slowdown())
