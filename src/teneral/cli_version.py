"""The line of `teneral --version`, with the commit that the program was built from.

A wheel and a source distribution have the commit in the file `COMMIT` of this folder, which their build writes
(`setup.py`). A checkout asks git.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMIT_FILE = "COMMIT"
MAX_COMMIT_CHARS = 64
GIT_S = 10.0
_PACKAGE = Path(__file__).resolve().parent


def version_line() -> str:
    """`teneral 0.1.0 (5f8a30c4d2e1)`; without the part in parentheses where the commit is unknown."""
    from . import __version__

    commit = built_from(_PACKAGE)
    return f"teneral {__version__} ({commit})" if commit else f"teneral {__version__}"


def built_from(package: Path) -> str:
    """The commit of the package's sources, ending in `-dirty` where files were changed; "" where unknown.

    The git repository counts only if it has the package at `src/teneral`: another one may happen to have the
    environment in which Teneral is installed.
    """
    try:
        with open(package / COMMIT_FILE, encoding="ascii", errors="replace") as file:
            return file.read(MAX_COMMIT_CHARS).strip()
    except OSError:
        root = package.parents[1]
    if not (root / ".git").exists():  # a folder, or a worktree's file
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()[:MAX_COMMIT_CHARS] if done.returncode == 0 else ""
