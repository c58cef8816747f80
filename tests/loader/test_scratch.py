"""Temporary folders, and those that killed processes have left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.support.abandoned_folders import age, folder_of

from teneral.loader.process.scratch import LOCK_NAME, ScratchFolder, remove_abandoned

PREFIX = "teneral-test-"
OWNER = f"""
import time
from teneral.loader.process.scratch import ScratchFolder
with ScratchFolder({PREFIX!r}) as folder:
    print(folder.path, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_removed_at_its_end(temporary: Path) -> None:
    with ScratchFolder(PREFIX) as folder:
        (folder.path / "file").write_bytes(b"x")
        assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_live_one_is_not() -> None:
    with folder_of(OWNER) as other:
        remove_abandoned(PREFIX)
        assert other.exists()
    remove_abandoned(PREFIX)
    assert not other.exists()


def test_other_files_stay(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"")
    link = temporary / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    fresh = temporary / f"{PREFIX}fresh"
    fresh.mkdir()
    hidden = temporary / f"{PREFIX}linked-lock"
    hidden.mkdir()
    (hidden / LOCK_NAME).symlink_to(elsewhere / "file")
    age(hidden)
    remove_abandoned(PREFIX)
    assert link.is_symlink()
    assert all(path.exists() for path in (elsewhere / "file", fresh, hidden))


def test_a_folder_of_the_same_prefix_that_no_process_made_stays(temporary: Path) -> None:
    models, empty = temporary / f"{PREFIX}models", temporary / f"{PREFIX}empty"
    for folder in (models, empty):
        folder.mkdir()
    (models / "weights").write_bytes(b"kept")
    age(models)
    age(empty)
    remove_abandoned(PREFIX)
    assert (models / "weights").read_bytes() == b"kept"
    assert not empty.exists(), "as a process leaves it that is killed before it has its lock"
