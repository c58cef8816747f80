"""A standby pool with a base: its processes serve the base without a read, and fine-tunes by their differences."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.support.standby_processes import (
    WAIT_S,
    Pool,
    Server,
    command_line,
    descendants,
    num_threads,
    runs,
    until,
)
from tests.support.store_faults import Fault
from tests.support.store_http import Request as StoreRequest
from tests.support.store_server import StoreServer
from tests.support.switching import Models

from teneral.handlers.standby.base import PoolBase
from teneral.handlers.standby.handover import ask_status
from teneral.loader.artifact import open_artifact
from teneral.loader.errors import UnavailableError
from teneral.loader.load import shared_child
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")

REQUEST = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
}
DRAFT = {"teneral": {"first_token": "draft"}}
MARK = "base in memory"


class Bucket(Models):
    """Models in a store, which notes what is read of it, and holds some of it back."""

    def __init__(self, folder: Path) -> None:
        self.may_send = threading.Event()
        self.may_send.set()
        self.store = StoreServer(folder, fault=self._hold)
        bucket = folder / "bucket"
        bucket.mkdir()
        super().__init__(bucket)
        self.answers: dict[str, Any] = {}

    def _hold(self, request: StoreRequest) -> Fault | None:
        if "refine" in request.key:
            self.may_send.wait(WAIT_S)
        return None

    def address(self, name: str) -> str:
        return f"{self.store.url}/bucket/{name}"

    def digest(self, name: str) -> bytes:
        digest = open_artifact(FileStore(self.folder / name), without_base=True).digest
        assert digest is not None
        return digest

    def size_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).rglob("*") if path.is_file())

    def read(self) -> dict[str, int]:
        """The bytes that were sent of each object since the log was cleared."""
        sent: dict[str, int] = {}
        for entry in self.store.log():
            sent[entry.key] = sent.get(entry.key, 0) + entry.sent_bytes
        return {key: size for key, size in sent.items() if size}

    def alone(self, name: str) -> Any:
        """The answer of a server that no pool has to do with."""
        if name not in self.answers:
            with Server(self.folder / name, self.folder / "absent.sock") as server:
                self.answers[name] = answer(server)
        return self.answers[name]


def answer(server: Server, **more: Any) -> Any:
    """The text with its log-probabilities, which are equal only where all weights are."""
    status, body = server.get("/v1/completions", {**REQUEST, **more})
    assert status == 200, body
    return body["choices"][0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    models = Bucket(tmp_path_factory.mktemp("base"))
    with models.store:
        models.tuned("tuned", seed=1)
        models.tuned("other", seed=2)
        yield models


def pool_with(base: str, folder: Path) -> Pool:
    """A pool that has loaded the base."""
    pool = Pool(folder, "--base", base)
    until(lambda: not status_of(pool)["base"]["loading"], "the base is in memory")
    pool.wait_full()
    return pool


def status_of(pool: Pool) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def answers() -> bool:
        try:
            found.append(ask_status(str(pool.path)))
        except UnavailableError:
            return False
        return bool(found[-1])

    until(answers, "the pool answers")
    return found[-1]


@pytest.fixture(scope="module")
def pool(models: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_with(models.address("base"), tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def mappings(pid: int) -> list[dict[str, int]]:
    """The figures, in KiB, of each mapping of the base's memory file."""
    found: list[dict[str, int]] = []
    is_base = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            if is_base := "memfd:teneral-base" in line:
                found.append({})
        elif is_base and (figure := re.match(r"(\w+): +(\d+) kB", line)):
            found[-1][figure[1]] = int(figure[2])
    return found


def holds_base(pid: int) -> bool:
    """True if the process has a base's memory file open."""
    names = []
    with contextlib.suppress(OSError):  # it has ended, or closes files
        names = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return any("memfd:teneral-base" in name for name in names)


def taken(pool: Pool) -> list[int]:
    """The processes that serve and show the base."""
    return [pid for pid in _children(pool.process.pid) if runs(pid) and mappings(pid)]


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_pinned_base_is_served_without_a_request_to_the_store(models: Bucket, pool: Pool) -> None:
    pool.wait_full()
    models.store.clear_log()
    pinned = f"{models.address('base')}@b3:{models.digest('base').hex()}"
    with Server(pinned, pool.path) as server:
        assert answer(server) == models.alone("base")
        assert MARK in server.marks()
        assert server.get("/v1/models")[0] == 200
    assert models.store.log() == []


def test_of_a_base_without_a_pin_only_the_manifest_is_read(models: Bucket, pool: Pool) -> None:
    pool.wait_full()
    models.store.clear_log()
    with Server(models.address("base"), pool.path, "--verify-exact") as server:
        assert answer(server) == models.alone("base")
    assert set(models.read()) == {"base/manifest.json"}


@pytest.mark.parametrize("with_base", [False, True])
def test_of_a_fine_tune_no_more_than_its_own_artifact_is_read(
    models: Bucket, pool: Pool, *, with_base: bool
) -> None:
    pool.wait_full()
    models.store.clear_log()
    flags = ("--base", models.address("base")) if with_base else ()
    with Server(models.address("tuned"), pool.path, "--verify-exact", *flags) as server:
        assert answer(server) == models.alone("tuned-whole")
        assert MARK in server.marks()
        figures = server.get("/v1/models")[0]
    assert figures == 200
    sent = models.read()
    assert {key.partition("/")[0] for key in sent} == {"tuned"}
    assert not any("tokenizer" in key for key in sent), "its tokenizer is the base's"
    assert sum(sent.values()) <= models.size_bytes("tuned")


def test_the_base_drafts_while_the_difference_arrives(models: Bucket, pool: Pool) -> None:
    pool.wait_full()
    models.may_send.clear()
    try:
        with Server(models.address("tuned"), pool.path) as server:
            drafted = answer(server, max_tokens=4, **DRAFT)
            assert drafted["text"]
            assert drafted["text"] == models.alone("base")["text"][: len(drafted["text"])]
            assert not runs_exact(server)
            models.may_send.set()
            assert answer(server) == models.alone("tuned-whole")
    finally:
        models.may_send.set()


def runs_exact(server: Server) -> bool:
    return "all weights exact" in server.marks()


def test_the_base_is_in_memory_once_and_never_written(models: Bucket, pool: Pool) -> None:
    pool.wait_full()
    with (
        Server(models.address("base"), pool.path) as first,
        Server(models.address("tuned"), pool.path) as second,
    ):
        assert answer(first) == models.alone("base")
        assert answer(second) == models.alone("tuned-whole")
        until(lambda: len(taken(pool)) >= 2, "both show the base")
        found = [mapping for pid in taken(pool) for mapping in mappings(pid)]
        assert all(mapping["Private_Dirty"] == 0 and mapping["Anonymous"] == 0 for mapping in found)
        assert all(mapping["Rss"] > 0 for mapping in found)
        status = status_of(pool)
        assert status["serving"] >= 2
        held_kib = status["base"]["bytes"] / 1024
        assert sum(mapping["Pss"] for mapping in found) <= held_kib + 8
        metrics = metrics_of(second)
        assert f"teneral_shared_base_bytes {float(status['base']['bytes'])}" in metrics


def metrics_of(server: Server) -> str:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=WAIT_S) as response:
        return str(response.read().decode())


def test_a_killed_server_leaves_the_base_and_the_others_as_they_were(models: Bucket, pool: Pool) -> None:
    pool.wait_full()
    with (
        Server(models.address("base"), pool.path) as first,
        Server(models.address("tuned"), pool.path) as second,
    ):
        assert answer(first) == models.alone("base")
        (base_pid, tuned_pid) = (serving_pid(first, pool), serving_pid(second, pool))
        assert base_pid != tuned_pid
        os.kill(tuned_pid, signal.SIGKILL)
        assert second.process.wait(WAIT_S) == 1
        assert answer(first) == models.alone("base")
        pool.wait_full()
        with Server(models.address("other"), pool.path) as third:
            assert answer(third) == models.alone("other-whole")
            assert MARK in third.marks()
    assert status_of(pool)["base"]["error"] is None


def serving_pid(server: Server, pool: Pool) -> int:
    """The process of the pool that listens at the server's port."""
    server.get("/v1/models")
    found: list[int] = []

    def is_known() -> bool:
        found[:] = [pid for pid in _children(pool.process.pid) if f":{server.port:04X}" in listening(pid)]
        return bool(found)

    until(is_known, "a process of the pool serves")
    return found[0]


def listening(pid: int) -> set[str]:
    """The ports, `:` and hexadecimal, of the listening sockets that a process has open."""
    ports = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            ports[fields[9]] = ":" + fields[1].rpartition(":")[2]
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = re.match(r"socket:\[(\d+)\]", os.readlink(entry))
            if match and match[1] in ports:
                found.add(ports[match[1]])
    except OSError:
        return set()
    return found


def test_servers_outlive_the_pool_and_new_ones_start_by_themselves(models: Bucket, tmp_path: Path) -> None:
    pool = pool_with(models.address("base"), tmp_path)
    with (
        Server(models.address("base"), pool.path) as first,
        Server(models.address("tuned"), pool.path) as second,
    ):
        assert answer(first) == models.alone("base")
        assert answer(second) == models.alone("tuned-whole")
        waiting = pool.wait_full()
        pool.process.kill()
        pool.process.wait(WAIT_S)
        until(lambda: not any(map(runs, waiting)), "the waiting processes have ended")
        assert answer(first) == models.alone("base")
        assert answer(second) == models.alone("tuned-whole")
        with Server(models.address("tuned"), pool.path, "--base", models.address("base")) as third:
            assert answer(third) == models.alone("tuned-whole")
            assert MARK not in third.marks()
    assert pool.process.stderr is not None
    pool.process.stderr.close()


@pytest.mark.parametrize("flags", [(), ("--loader", "thread"), ("--loader", "process")])
def test_a_server_of_another_model_keeps_none_of_the_bases_memory(
    models: Bucket, pool: Pool, flags: tuple[str, ...]
) -> None:
    pool.wait_full()
    with Server(models.address("other-whole"), pool.path, *flags) as server:
        assert answer(server) == models.alone("other-whole")
        assert "taken over by a standby" in server.marks()
        (served,) = [pid for pid in _children(pool.process.pid) if runs(pid) and os.getsid(pid) == pid]
        family = [served, *descendants(served)]
        until(lambda: not any(map(holds_base, family)), "the base's file is closed")


@pytest.mark.parametrize("name", ["base", "tuned"])
def test_a_server_that_unloads_its_model_keeps_none_of_the_bases_memory(
    models: Bucket, pool: Pool, name: str
) -> None:
    pool.wait_full()
    with Server(models.address(name), pool.path, "--model-control") as server:
        answer(server)
        pid = serving_pid(server, pool)
        assert holds_base(pid)
        url = f"http://127.0.0.1:{server.port}/v2/repository/models/tiny/unload"
        urlopen(Request(url, method="POST"), timeout=WAIT_S).close()
        assert not mappings(pid)
        assert not holds_base(pid)


def test_another_base_is_taken_up_on_request_and_serves_nothing_before(
    models: Bucket, tmp_path: Path
) -> None:
    place = models.folder / "moving"
    shutil.copytree(models.folder / "base", place)
    with pool_with(models.address("moving"), tmp_path) as pool:
        before = status_of(pool)["base"]["digest"]
        with Server(models.address("moving"), pool.path) as old:
            assert answer(old) == models.alone("base")
            shutil.rmtree(place)
            pack(FileStore(models.folder / "other-plain"), FileStore(place))
            pool.wait_full()
            with Server(models.address("moving"), pool.path) as other:
                assert answer(other) == models.alone("other-whole")
                assert MARK not in other.marks(), "the pool's base is another one by now"
            waiting = pool.wait_full()
            pool.process.send_signal(signal.SIGHUP)
            until(lambda: status_of(pool)["base"]["digest"] not in (before, None), "the new base is held")
            until(lambda: not any(map(runs, waiting)), "the processes with the old base have ended")
            pool.wait_full()
            with Server(models.address("moving"), pool.path) as new:
                assert answer(new) == models.alone("other-whole")
                assert MARK in new.marks()
            assert answer(old) == models.alone("base")
        # What is gone by then leaves the base as it is.
        shutil.rmtree(place)
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: status_of(pool)["base"]["error"] is not None, "the failure is known")
        assert status_of(pool)["base"]["digest"] == models.digest("other-whole").hex()


def test_the_pool_serves_without_its_base_while_that_is_loaded_and_keeps_one_thread(
    models: Bucket, tmp_path: Path
) -> None:
    models.may_send.clear()
    try:
        with Pool(tmp_path, "--base", models.address("base")) as pool:
            assert status_of(pool)["base"]["loading"]
            assert num_threads(pool.process.pid) == 1, "its forks would miss any other"
            commands = [" ".join(command_line(pid)) for pid in _children(pool.process.pid)]
            assert not any("shared_child" in command for command in commands), "the loading one is a fork"
            with Server(models.folder / "plain", pool.path) as server:
                assert answer(server)["text"]
                assert "taken over by a standby" in server.marks()
                everyone = [pool.process.pid, *descendants(pool.process.pid)]
                holders = [pid for pid in everyone if holds_base(pid)]
                assert len(holders) == 2, "the pool and the process that loads: others would keep the memory"
            models.may_send.set()
            until(lambda: not status_of(pool)["base"]["loading"], "the base is in memory")
    finally:
        models.may_send.set()


def test_a_fine_tune_of_another_base_is_refused_with_both_digests(models: Bucket, tmp_path: Path) -> None:
    with pool_with(models.address("other-whole"), tmp_path) as pool:
        with Server(models.address("tuned"), pool.path) as server:
            log = server.process.communicate(timeout=WAIT_S)[1]
        assert f"only the differences to b3:{models.digest('base').hex()}" in log
        assert f"the base in memory is b3:{models.digest('other-whole').hex()}" in log
        assert "--base" in log
        pool.wait_full()
        with Server(models.address("tuned"), pool.path, "--base", models.address("base")) as server:
            assert answer(server) == models.alone("tuned-whole")
            assert MARK not in server.marks()


@pytest.mark.parametrize(
    ("name", "pin", "words"),
    [
        ("plain", "", "it is plain, and only an artifact can be a base"),
        ("tuned", "", "it holds only the differences to b3:"),
        ("absent", "", "absent"),
        ("base", "@b3:" + "0" * 64, "b3:"),
    ],
)
def test_a_base_that_cannot_be_one_ends_the_pool_with_its_reason(
    models: Bucket, tmp_path: Path, name: str, pin: str, words: str
) -> None:
    pool = Pool(tmp_path, "--base", models.address(name) + pin)
    assert pool.process.wait(WAIT_S) not in (0, None)
    pool.stop()
    assert words in pool.stderr_text
    assert not pool.path.exists()


def test_status_is_printed_as_json_and_needs_a_pool(models: Bucket, pool: Pool, tmp_path: Path) -> None:
    import subprocess

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "teneral", "standby", str(path), "--status"]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    pool.wait_full()
    status = json.loads(run(pool.path).stdout)
    assert status["waiting"] == 2
    assert status["base"]["address"] == models.address("base")
    assert status["base"]["digest"] == models.digest("base").hex()
    failed = run(tmp_path / "absent.sock")
    assert failed.returncode != 0
    assert "no standby pool" in failed.stderr


def test_a_system_without_room_for_another_process_leaves_the_base_and_the_pool(
    models: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = PoolBase(str(models.folder / "base"), SourceOptions())
    try:
        assert base.take()

        def refuse() -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as changed:
            changed.setattr(shared_child, "new_memory_file", refuse)
            base.load()
        assert not base.is_loading
        assert "Too many open files" in base.status()["error"]
        assert base.status()["digest"] == models.digest("base").hex()
        base.load()
        assert not base.take(), "it has the same digest"
        assert base.status()["error"] is None
    finally:
        base.close()
