"""Temporary folders of killed processes, for tests of their removal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teneral.loader.process.scratch import MIN_AGE_S


def age(folder: Path) -> None:
    """Make the folder old enough to be removed."""
    long_ago_s = time.time() - 2 * MIN_AGE_S
    os.utime(folder, (long_ago_s, long_ago_s))


@contextmanager
def folder_of(program: str) -> Iterator[Path]:
    """An old folder with a file, of a process that runs `program`, which prints its folder and sleeps. The process
    is killed at the end.
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "file").write_bytes(b"x")
        age(folder)
        try:
            yield folder
        finally:
            owner.send_signal(signal.SIGKILL)
