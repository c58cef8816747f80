"""A real memory cgroup, where the system lets us make one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


class MemoryCgroup:
    def __init__(self, folder: Path, limit: str) -> None:
        self.folder = folder
        self.limit = limit  # the name of the file that says it
        self.name = f"{limit} of the cgroup /{folder.name}"  # as errors call it

    def set_limit(self, size_bytes: int) -> None:
        (self.folder / self.limit).write_text(str(size_bytes))

    def command(self, command: Sequence[str]) -> list[str]:
        """The same program, in the cgroup from its first instruction on."""
        join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
        return [sys.executable, "-c", join, str(self.folder / "cgroup.procs"), *command]


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A cgroup of the test's own; skips the test where there can be none. Its processes must have ended by the end."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_v2 else CGROUPS / "memory") / f"teneral-test-{os.getpid()}"
    limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this system allows no cgroup")
    try:
        if not (folder / limit).exists():
            pytest.skip("this system limits no memory by cgroups")
        yield MemoryCgroup(folder, limit)
    finally:
        folder.rmdir()
