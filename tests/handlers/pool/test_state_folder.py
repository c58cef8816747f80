"""The pool's state folder, and those that killed runs have left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.support.abandoned_folders import folder_of

from teneral.handlers.pool.run import state_folder
from teneral.loader.errors import UsageError

RUN = """
import sys, time
from teneral.handlers.pool.run import state_folder
with state_folder(None) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_runs_folder_is_private_and_removed_at_its_end(temporary: Path) -> None:
    with state_folder(None) as folder:
        (folder / "snapshot").write_bytes(b"kept")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_run_is_removed_by_the_next_one_and_that_of_a_live_one_is_not() -> None:
    with folder_of(RUN) as other, state_folder(None):
        assert other.exists()
    with state_folder(None):
        assert not other.exists()


def test_a_named_folder_stays(temporary: Path) -> None:
    with state_folder(str(temporary / "a" / "b")) as folder:
        (folder / "snapshot").write_bytes(b"kept")
    assert (temporary / "a" / "b" / "snapshot").read_bytes() == b"kept"
    with pytest.raises(UsageError, match="state"), state_folder(str(temporary / "a" / "b" / "snapshot")):
        pass


def test_a_named_folder_is_one_pools_at_a_time(temporary: Path) -> None:
    named = str(temporary / "a")
    refused = pytest.raises(UsageError, match=f"another pool keeps its state in {named}")
    with state_folder(named), refused, state_folder(named):
        pass
    with state_folder(named), state_folder(str(temporary / "b")):
        pass
