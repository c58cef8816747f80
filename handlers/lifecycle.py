"""Functions that run around a checkpoint: before a platform keeps this process's memory, and after it runs on from it.

    @before_checkpoint
    def close_connections(): …

    @after_restore
    def open_them_again(): …

A restored process may be one of many copies, at another time and on another machine: what must be its own (connections,
ids, seeds, credentials) is made anew after a restore. Teneral sees to its own; these are for the handler's. It does not
know who keeps memory, and when.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[[], Any])


@dataclass
class Hooks:
    """What was asked for, in the order of asking. Not thread-safe: handlers are imported in one thread."""

    before: list[Callable[[], Any]] = field(default_factory=list)
    after: list[Callable[[], Any]] = field(default_factory=list)

    def run_before(self) -> None:
        """Those before the checkpoint, the last one first: it may need what the earlier ones made. Raises what they
        raise.
        """
        for hook in [*self.before, *_foreign("get_before_snapshot")][::-1]:
            hook()

    def run_after(self) -> None:
        """Those after it, in their order. Raises what they raise."""
        for hook in [*self.after, *_foreign("get_after_restore")]:
            hook()


# The module's own, because a decorator has nobody to ask for another: a process serves one handler.
HOOKS = Hooks()


def before_checkpoint(hook: Hook) -> Hook:
    """Have a function without arguments run before memory is kept. A decorator, or called with it."""
    HOOKS.before.append(hook)
    return hook


def after_restore(hook: Hook) -> Hook:
    """Have a function without arguments run in a process that goes on from kept memory."""
    HOOKS.after.append(hook)
    return hook


def _foreign(getter: str) -> list[Callable[[], Any]]:
    """What was registered with AWS's own library for this: a handler that uses it runs here unchanged. Nobody has
    imported that library where there is nothing to find in it.
    """
    module = sys.modules.get("snapshot_restore_py")
    if module is None:
        return []
    return [partial(function, *args, **kwargs) for function, args, kwargs in getattr(module, getter)()]
