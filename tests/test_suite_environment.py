"""The suite's own environment: a watchdog that knows the load, caches on full disks, several interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.support.instances import TinyParts
from tests.support.load import MAX_SLOWDOWN, MIN_PATIENCE, patience_s, slowdown

from teneral.loader.cache import folder as cache_folder
from teneral.runtime.backends import choose

ROOT = Path(__file__).parent.parent
LOADED = """
import os
os.getloadavg = lambda: ({load}, 0.0, 0.0)
os.cpu_count = lambda: 2
from tests.conftest import pytest_timeout_set_timer
"""
SLEEPER = """
import time

def test_that_takes_a_second_and_a_half():
    time.sleep(1.5)
"""


@pytest.mark.parametrize(("load", "passes"), [(0.1, False), (20.0, True)])
def test_a_time_limit_counts_seconds_of_a_quiet_machine(tmp_path: Path, load: float, passes: bool) -> None:
    (tmp_path / "conftest.py").write_text(LOADED.format(load=load))
    (tmp_path / "test_sleeper.py").write_text(SLEEPER)
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "0.5", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience_s(30),
        check=False,
    )
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert ("Timeout" in done.stdout) != passes


def test_bounds_grow_with_the_tasks_that_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, expected in ((0.0, 1.0), (2.0, 1.0), (20.0, 10.0), (1e6, MAX_SLOWDOWN)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert slowdown() == expected
        assert patience_s(30) == 30 * max(MIN_PATIENCE, 2 * expected)


def test_no_example_of_a_property_is_too_slow() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_caches_of_tests_need_no_free_tenth_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 1_000_000, 50_000, 50_000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(cache_folder.os, "fstatvfs", lambda _fd: full)
    folder = cache_folder.CacheFolder(tmp_path, budget_bytes=1 << 20)
    assert folder.write(bytes(32), memoryview(b"part"))


@pytest.mark.usefixtures("tenth_stays_free")
def test_a_test_may_ask_for_the_caches_own_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 1_000_000, 50_000, 50_000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(cache_folder.os, "fstatvfs", lambda _fd: full)
    folder = cache_folder.CacheFolder(tmp_path, budget_bytes=1 << 20)
    assert not folder.write(bytes(32), memoryview(b"part"))


def test_models_of_tests_are_computed_as_users_models_are(tmp_path: Path) -> None:
    """Torch, the reference, gives other bits under load: `build_model` chose it where no test named a backend."""
    served = choose.BackendChoice().model_backends()
    assert TinyParts.make("llama", tmp_path).model.executor.name == next(served).name


def test_an_order_of_chance_runs_every_test_once_and_the_same_way_twice(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    for name in "abc":
        text = "import pytest\n@pytest.mark.parametrize('number', range(5))\ndef test_it(number): pass\n"
        (tmp_path / f"test_{name}.py").write_text(text)

    def order(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience_s(30),
            check=True,
        )
        return [line for line in done.stdout.splitlines() if "::" in line]

    plain, shuffled = order(), order("--shuffle", "7")
    assert shuffled == order("--shuffle", "7")
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    files = [line.split("::")[0] for line in shuffled]
    assert len([name for place, name in enumerate(files) if place == 0 or files[place - 1] != name]) == 3
