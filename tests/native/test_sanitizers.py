"""The core's functions under the compiler's sanitizers, called by a driver in C."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.load import patience_s

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """gcc with its sanitizers; skips where there is none."""
    found = shutil.which("gcc")
    source = tmp_path / "empty.c"
    source.write_text("int main(void) { return 0; }")
    flags = ["-fsanitize=address,undefined", "-o", str(tmp_path / "empty")]
    if (
        found is None
        or subprocess.run([found, *flags, str(source)], capture_output=True, check=False).returncode
    ):
        pytest.skip("no gcc with sanitizers")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_sanitizer_finds_anything(compiler: str) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "sanitize-native")],
        env={**os.environ, "CC": compiler, "CASES": "20"},
        capture_output=True,
        text=True,
        timeout=patience_s(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
