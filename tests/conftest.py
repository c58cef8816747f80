"""The surroundings of every test: a watchdog that knows the machine's load, and a cache on any disk."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from tests.support.load import slowdown

from teneral.loader.cache import folder as cache_folder
from teneral.runtime.onnx.spec import NO_TELEMETRY

# An example's time is the machine's load: none is too slow. All else stays that of the profile at hand (CI's is fixed).
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run files, and the tests of each, in this order of chance",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A shell ignores Ctrl-C for what it runs in the background, and so would every process that a test starts. And no
    test may have ONNX Runtime send telemetry.
    """
    config.pluginmanager.register(SkipsWithoutTorch())
    os.environ.setdefault(NO_TELEMETRY, "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests and the modules that they import are a million objects, which stay: no collection of garbage looks at
    them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


NEEDS_TORCH = ("torch", "transformers")


class SkipsWithoutTorch:
    """A file or a folder that imports torch is skipped where there is none: `scripts/test-pythons --lean`. A plugin,
    because a folder whose own conftest.py cannot be imported asks no other one.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        missing = [name for name in NEEDS_TORCH if f"No module named '{name}'" in str(report.longrepr)]
        if report.failed and missing:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"needs {missing[0]}")
        return report


LONGEST = ("test_sanitizers.py",)  # a minute and a half in one test


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every process of a run finds the same order. The tests of a file stay together, for what they share."""
    seed = config.getoption("shuffle")
    if seed is None:
        items.sort(key=lambda item: item.path.name not in LONGEST)  # one left for the end keeps one core busy
        return
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    chance = random.Random(seed)
    files = list(by_file.values())
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = [item for tests in files for item in tests]


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """The time limit of one test, in seconds of a quiet machine: at its end the load decides whether the test hangs."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # the plugin's own timer
    begun_s = time.monotonic()

    def expired(_signal: int, _frame: Any) -> None:
        __tracebackhide__ = True
        factor = slowdown()
        missing_s = settings.timeout * factor - (time.monotonic() - begun_s)
        if missing_s > 0:
            signal.setitimer(signal.ITIMER_REAL, missing_s)
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.fixture(autouse=True)
def any_free_share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part cache keeps a tenth of a disk free; a test's cache works on a disk that is fuller than that."""
    if "tenth_stays_free" not in request.fixturenames:
        monkeypatch.setattr(cache_folder, "FREE_SHARE", 1 << 62)


@pytest.fixture
def tenth_stays_free() -> None:
    """The cache's own reserve, for a test on a disk of its own."""


@pytest.fixture
def roomy_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of which a tenth is free, for a cache in a process that no fixture reaches."""
    for folder in (tmp_path, Path("/dev/shm")):
        if folder.is_dir() and _share_free(folder) > 0.12:
            with tempfile.TemporaryDirectory(prefix="teneral-test-", dir=folder) as path:
                yield Path(path)
            return
    pytest.skip("no disk here has a tenth of its room free, which the part cache would leave alone")


def _share_free(folder: Path) -> float:
    disk = os.statvfs(folder)
    return disk.f_bavail / max(1, disk.f_blocks)
