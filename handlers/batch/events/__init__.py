"""The handler of events that start batch jobs: `--handler teneral.handlers.batch:handler`
(docs/batch.md).

`parse.py` parses events and `outputs.py` chooses the outputs so that these start no jobs, both
pure; `requests.py` answers single requests and those from a queue, and `handler.py` reports the failed
messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .handler import handler

__all__ = ["handler"]


def __getattr__(name: str) -> Any:
    # Importing only the errors must not import a server.
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .handler import handler

    return handler
