"""Compiling beside the serving ends with who wanted it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from teneral.runtime.kernels.prepare import compile_elsewhere

pytest.importorskip("numba", reason="kernels are compiled with numba")


def test_what_nobody_wants_any_more_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ended = threading.Event()
    ended.set()
    compile_elsewhere(["heads:64"], ended)
    assert not list(tmp_path.rglob("*.nbi"))
