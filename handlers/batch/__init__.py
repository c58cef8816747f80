"""Batch jobs: a file of requests becomes a file of answers, each written exactly once."""

from typing import Any

__all__ = ["handler"]


def __getattr__(name: str) -> Any:
    # `teneral batch` does not need the event handler, which imports a server.
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .events.handler import handler

    return handler
