"""Batch jobs: a file of requests becomes a file of answers, each of which is there exactly once."""

from typing import Any

__all__ = ["handler"]


def __getattr__(name: str) -> Any:
    # `teneral batch` needs nothing of what answers events, and it imports a server.
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .events.handler import handler

    return handler
