"""Hugging Face's own library on a test's Hub: in a process of its own, as it reads its settings when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.hub_server import HubServer, hub_variables
from tests.support.load import patience_s


def _process(
    program: str, server: HubServer, home: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import json, huggingface_hub as hub\nprint(json.dumps({program}))"],
        env=os.environ | hub_variables(server, home) | {"HF_HUB_DISABLE_XET": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=False,
    )


def run(program: str, server: HubServer, home: Path, **variables: str) -> Any:
    """The value of an expression of `hub`."""
    result = _process(program, server, home, variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def failure(program: str, server: HubServer, home: Path, **variables: str) -> str:
    result = _process(program, server, home, variables)
    assert result.returncode != 0, result.stdout
    return result.stderr
