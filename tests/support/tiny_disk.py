"""A real file system that is soon full: a tmpfs of a given size, where the machine lets us mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.load import patience_s


@contextmanager
def tiny_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts it on `folder`, which is made. Skips the test where mounting is not allowed."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(
            ["mount", *options], capture_output=True, text=True, check=False, timeout=patience_s(20)
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True, timeout=patience_s(20))
