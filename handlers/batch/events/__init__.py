"""The handler of events that start batch jobs: `--handler teneral.handlers.batch:handler` (docs/batch.md).

`parse.py` says what an event asks for and `outputs.py` where the answers go and that they start nothing, both pure;
`requests.py` answers single requests, `desk.py` those that a queue brings; `queue.py` tells which messages failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .handler import handler

__all__ = ["handler"]


def __getattr__(name: str) -> Any:
    # Whoever only wants to know the errors need not import a server.
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .handler import handler

    return handler
