"""`teneral serve --standby N`: a pool for the next server on this node, for as long as this one lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.standby_processes import (
    WAIT_S,
    Server,
    children,
    command_line,
    descendants,
    runs,
    until,
    waiting_processes,
)
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("standby") / "tiny")


class FirstServer(Server):
    """A server with a pool of two."""

    def __init__(self, model: Path | str, socket_path: Path) -> None:
        super().__init__(model, socket_path, "--standby", "2")
        self.path = socket_path

    def pools(self) -> list[int]:
        """Processes that are `teneral standby` by now, whatever they were at first."""
        return [child for child in children(self.process.pid) if "standby" in command_line(child)]

    def pool_when_full(self) -> int:
        def is_full() -> bool:
            return any(len(waiting_processes(pool)) == 2 for pool in self.pools())

        until(is_full, "the server's pool of two")
        (pool,) = self.pools()
        return pool


@pytest.fixture
def first(model: Path, tmp_path: Path) -> Iterator[FirstServer]:
    with FirstServer(model, tmp_path / "standby.sock") as server:
        yield server
        server.process.kill()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if str(server.path) in command_line(pid) and pid != server.process.pid:  # should have ended
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_the_next_server_is_served_from_the_pool_of_the_first(first: FirstServer, model: Path) -> None:
    answer = first.complete()
    pool = first.pool_when_full()
    before = set(waiting_processes(pool))
    with Server(model, first.path) as second:
        assert second.complete() == answer
        assert "taken over by a standby" in second.marks()
        assert "taken over by a standby" not in first.marks()
        until(lambda: len(waiting_processes(pool)) == 2, "the pool to be full again")
        assert len(before & set(waiting_processes(pool))) == 1
        second.end_well()
    assert first.complete() == answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_pool_ends_with_the_server_that_keeps_it(first: FirstServer, number: int) -> None:
    first.complete()
    first.pool_when_full()
    kept = descendants(first.process.pid)
    assert len(kept) >= 3, "the pool, and two that wait"
    first.process.send_signal(number)
    assert first.process.wait(WAIT_S) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    until(lambda: not any(map(runs, kept)), "the pool's processes and their helpers to end")
    until(lambda: not first.path.exists(), "the socket to be gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_pool_that_still_imports_ends_with_its_server(first: FirstServer, number: int) -> None:
    until(first.path.exists, "the pool's socket, which is there before its imports")
    kept = descendants(first.process.pid)
    first.process.send_signal(number)
    assert first.process.wait(WAIT_S) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    until(lambda: not any(map(runs, kept)), "the pool's processes to end")
    until(lambda: not first.path.exists(), "the socket to be gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_was_served_from_the_pool_outlives_it(first: FirstServer, model: Path, number: int) -> None:
    answer = first.complete()
    pool = first.pool_when_full()
    with Server(model, first.path) as second:
        assert second.complete() == answer
        first.process.send_signal(number)
        first.process.wait(WAIT_S)
        until(lambda: not runs(pool), "the pool to end")
        assert second.complete() == answer
        assert "taken over by a standby" in second.marks()
        second.end_well()


@pytest.mark.parametrize("weights_come", [True, False])
def test_the_pool_is_not_in_the_way_of_the_weights(model: Path, tmp_path: Path, weights_come: bool) -> None:
    pack(FileStore(model), FileStore(tmp_path / "bucket" / "packed"))
    stalling, path = Fault(stall_after_bytes=0), tmp_path / "standby.sock"
    with (
        StoreServer(tmp_path, fault=lambda request: stalling if "blobs" in request.key else None) as store,
        FirstServer(f"{store.url}/bucket/packed", path) as server,
    ):
        assert server.get("/timeline")[0] == 200
        assert not [pid for pid in children(server.process.pid) if "--processes" in command_line(pid)]
        assert not path.exists()
        if weights_come:
            store.set_fault(None)
            store.drop_connections()
            server.pool_when_full()
        server.end_well()
        assert not path.exists()


def test_a_server_s_pool_needs_a_socket(model: Path) -> None:
    command = [sys.executable, "-m", "teneral", "serve", str(model), "--port", "0", "--standby", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert "--standby-socket" in ended.stderr
