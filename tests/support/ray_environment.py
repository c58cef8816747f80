"""The variables that Ray's workers, and the servers that they start, take over from a test."""

from __future__ import annotations

import os


def leave_out_test_settings() -> None:
    """A server refuses variables of its prefix that are no settings of its own."""
    for name in [name for name in os.environ if name.startswith("TENERAL_")]:
        del os.environ[name]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
