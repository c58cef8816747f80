"""How many cores there are is what the container may use, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from teneral.loader.process.cpu import available_cores

OWN = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000", OWN),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("99900000 100000", OWN),
        ("nonsense", OWN),
    ],
)
def test_a_version_2_quota_bounds_the_cores(tmp_path: Path, content: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota_us", "cores"), [("-1", OWN), ("20000", 1), ("100000", 1)])
def test_a_version_1_quota_bounds_the_cores(tmp_path: Path, quota_us: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota_us)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert available_cores(tmp_path) == cores


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none") == OWN
