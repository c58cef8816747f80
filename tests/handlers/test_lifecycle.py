"""Functions that run around a checkpoint."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from teneral.handlers import lifecycle
from teneral.handlers.lifecycle import Hooks


def test_those_before_run_backwards_and_those_after_forwards() -> None:
    seen: list[str] = []
    hooks = Hooks()
    for name in ("a", "b"):
        hooks.before.append(lambda name=name: seen.append(f"before {name}"))
        hooks.after.append(lambda name=name: seen.append(f"after {name}"))
    hooks.run_before()
    hooks.run_after()
    assert seen == ["before b", "before a", "after a", "after b"]


def test_a_decorated_function_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HOOKS", Hooks())

    @lifecycle.before_checkpoint
    def close() -> int:
        return 1

    @lifecycle.after_restore
    def reopen() -> int:
        return 2

    assert (close(), reopen()) == (1, 2)
    assert (lifecycle.HOOKS.before, lifecycle.HOOKS.after) == ([close], [reopen])


def test_what_was_registered_with_awss_own_library_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import snapshot_restore_py as theirs  # it comes with awslambdaric

    seen: list[Any] = []
    theirs.register_before_snapshot(seen.append, "before")
    theirs.register_after_restore(seen.append, "after")
    hooks = Hooks()
    hooks.run_before()
    hooks.run_after()
    assert seen == ["before", "after"]
    monkeypatch.delitem(sys.modules, "snapshot_restore_py")
    hooks.run_before()
    assert seen == ["before", "after"]
    assert isinstance(theirs, ModuleType)
