"""Compiling beside the serving ends with who wanted it, and begins when nobody waits for a first token."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from teneral.runtime.kernels import prepare
from teneral.runtime.kernels.prepare import compile_elsewhere

pytest.importorskip("numba", reason="kernels are compiled with numba")


def test_what_nobody_wants_any_more_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ended = threading.Event()
    ended.set()
    compile_elsewhere(["heads:64"], ended)
    assert not list(tmp_path.rglob("*.nbi"))


class Waiting:
    """Whether somebody waits for a first token, as each question finds it."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    def __call__(self) -> bool:
        self.num_asked += 1
        return self._answers.pop(0) if self._answers else False


def test_nothing_is_prepared_while_somebody_waits_for_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "POLL_S", 0.001)
    monkeypatch.setattr(prepare, "QUIET_S", 0.05)
    waiting = Waiting(*[False] * 3, *[True] * 40)
    prepare._wait_until_quiet(waiting, threading.Event())
    assert waiting.num_asked > 43


def test_who_is_asked_without_a_pause_prepares_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "POLL_S", 0.001)
    monkeypatch.setattr(prepare, "MAX_BUSY_S", 0.05)
    waiting = Waiting(*[True] * 100_000)
    prepare._wait_until_quiet(waiting, threading.Event())
    assert 0 < waiting.num_asked < 100_000


def test_an_instance_that_is_closed_waits_for_nobody() -> None:
    ended = threading.Event()
    ended.set()
    waiting = Waiting(*[True] * 100)
    prepare._wait_until_quiet(waiting, ended)
    assert waiting.num_asked <= 1
