from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.tiny_models import save_tiny

from teneral import cli


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts with different weights: `repository/1` and `/2`."""
    folder = tmp_path_factory.mktemp("models")
    for version in ("1", "2"):
        plain, artifact = folder / f"plain-{version}", folder / "repository" / version
        save_tiny("llama", plain, seed=int(version))
        assert cli.run(["pack", str(plain), str(artifact), "--quiet"]) == 0
    return folder
