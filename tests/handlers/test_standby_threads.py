"""Standby processes are forks of a process with one thread that ran nothing in parallel: so parallel work ends in them.
And OpenMP's threads sleep while they wait, in every server (docs/decisions/0007).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.standby_processes import Pool, Server, children, num_threads, until
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")

# Once while it is imported, in the server's first thread, the one that was forked; and once in a thread of its own,
# after the model has computed something: by then torch is configured as the server has it.
PARALLEL = """
import os, torch

def compute():
    torch.set_num_threads(3)
    product = torch.ones(1024, 1024) @ torch.ones(1024, 1024)
    return float(product.sum()), float(torch.zeros(1 << 22).exp().mean())

IMPORTING = compute()

def handler(event, context):
    context.model.generate("a", max_tokens=1)
    before = set(os.listdir("/proc/self/task"))  # some of which may end meanwhile
    answer = [IMPORTING, compute(), torch.get_num_threads()]
    return [*answer, len(set(os.listdir("/proc/self/task")) - before)]
"""
POLICY = """
import os

def handler(event, context):
    context.model.generate("a", max_tokens=1)
    return os.environ.get("OMP_WAIT_POLICY")
"""
SHOWN = {
    "OMP_DISPLAY_ENV": "verbose"
}  # the library says what it has read of its environment, once it is loaded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("threads") / "tiny")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def _handler(folder: Path, source: str) -> str:
    (folder / "mine.py").write_text(source)
    return f"--handler={folder}/mine.py:handler"


def test_who_forks_has_one_thread_and_so_have_its_forks(pool: Pool, model: Path) -> None:
    """Those of the first filling, and the one that takes the place of one that serves."""
    before = pool.wait_full()
    with Server(model, pool.path) as server:
        server.complete()
        until(lambda: len(set(pool.waiting()) - set(before)) == 1, "another in its place")
        for waiting in pool.wait_full():
            until(lambda pid=waiting: len(children(pid)) == 2, "its tokenizer and chat renderer")
            assert num_threads(waiting) == 1
        assert num_threads(pool.process.pid) == 1


@pytest.mark.parametrize("flags", [(), ("--memory", "64MiB")], ids=["plain", "memory ahead"])
def test_parallel_work_ends_in_a_standby(model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Were there threads of OpenMP's in the process that was forked, its fork would wait for ever for those to help."""
    with Pool(tmp_path, *flags) as pool:
        pool.wait_full()
        with Server(model, pool.path, _handler(tmp_path, PARALLEL)) as server:
            status, answer = server.get("/invoke", {})
            assert status == 200, answer
            right = [1024.0**3, 1.0]
            assert answer[:3] == [right, right, 3]
            assert answer[3] >= 2  # OpenMP's two, and any that began at the same time
            assert "taken over by a standby" in server.marks()


@pytest.mark.parametrize(("users", "expected"), [(None, "passive"), ("active", "active")])
def test_openmps_threads_sleep_unless_the_user_says_otherwise(
    model: Path, tmp_path: Path, users: str | None, expected: str
) -> None:
    handler, environment = _handler(tmp_path, POLICY), {"OMP_WAIT_POLICY": users} | SHOWN
    flags = (handler, "--backend", "torch")
    with Server(model, tmp_path / "absent.sock", *flags, environment=environment) as server:
        assert server.get("/invoke", {}) == (200, expected)
        code, log = server.end()
    assert code == 0
    assert _policies_read(log) == [expected]


@pytest.mark.parametrize(("users", "expected"), [(None, "passive"), ("active", "active")])
def test_openmps_threads_sleep_in_a_standby_unless_the_user_says_otherwise(
    model: Path, tmp_path: Path, users: str | None, expected: str
) -> None:
    """torch is imported by the process that has been given a model which it is to compute."""
    handler, environment = _handler(tmp_path, POLICY), {"OMP_WAIT_POLICY": users} | SHOWN
    with Pool(tmp_path, environment=environment) as pool:
        assert _policies_read(pool.stderr_text) == []
        pool.wait_full()
        with Server(model, pool.path, handler, "--backend", "torch", environment=environment) as server:
            assert server.get("/invoke", {}) == (200, expected)
            assert "taken over by a standby" in server.marks()
            code, log = server.end()
    assert code == 0
    assert _policies_read(log) == [expected]


def _policies_read(log: str) -> list[str]:
    """What each GNU OpenMP library in there has read. By how often its threads look before they sleep: it calls
    "passive" also what is no policy at all, 300,000 times.
    """
    counts = map(int, re.findall(r"GOMP_SPINCOUNT *= *'(\d+)'", log))
    return ["passive" if count == 0 else "active" if count > 10**9 else f"{count} times" for count in counts]
