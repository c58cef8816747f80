"""Checkpoint hooks: functions that run before a platform saves this process's memory, and after it
is restored.

    @before_checkpoint
    def close_connections(): …

    @after_restore
    def open_them_again(): …

A restored process may be one of many copies, at another time and on another machine: everything
that must be unique (connections, ids, seeds, credentials) is renewed after a restore. Teneral
renews its own; these hooks are for the handler's. This module does not know which platform saves
memory, and when.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[[], Any])


class Hooks:
    """The registered hooks, in order. Not thread-safe: handlers are imported in one thread."""

    def __init__(self) -> None:
        self.before: list[Callable[[], Any]] = []
        self.after: list[Callable[[], Any]] = []

    def run_before(self) -> None:
        """Run the hooks before the checkpoint, the last one first: it may need the results of
        earlier ones. Raises their errors.
        """
        for hook in [*self.before, *_foreign("get_before_snapshot")][::-1]:
            hook()

    def run_after(self) -> None:
        """Run the hooks after the restore, in order. Raises their errors."""
        for hook in [*self.after, *_foreign("get_after_restore")]:
            hook()


# A global, because a decorator has no argument for another one: a process serves one handler.
HOOKS = Hooks()


def before_checkpoint(hook: Hook) -> Hook:
    """Run a function without arguments before memory is saved. A decorator, or called with it."""
    HOOKS.before.append(hook)
    return hook


def after_restore(hook: Hook) -> Hook:
    """Run a function without arguments in a restored process."""
    HOOKS.after.append(hook)
    return hook


def _foreign(getter: str) -> list[Callable[[], Any]]:
    """The hooks registered with AWS's own library: a handler that uses it runs unchanged. If there
    are any, that library is imported already.
    """
    module = sys.modules.get("snapshot_restore_py")
    if module is None:
        return []
    return [partial(function, *args, **kwargs) for function, args, kwargs in getattr(module, getter)()]
