"""Several processes, crashes and damage: whatever happens to the cache's folder, no wrong byte is taken for right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.load import patience_s

from teneral.loader.cache.folder import PAGE_BYTES, TEMPORARY_LIFE_S, TEMPORARY_PREFIX
from teneral.loader.cache.part_cache import PartCache

WAIT_S = patience_s(30)
BUDGET_BYTES = 20 * PAGE_BYTES
PARTS = [
    random.Random(seed).randbytes(size) for seed, size in enumerate((1, 5000, 8192, 20_000, 30_000, 40_000))
]
DIGESTS = [blake3(data).digest() for data in PARTS]

numbers = st.integers(0, len(PARTS) - 1)


def files_of(directory: Path) -> list[Path]:
    """What counts against the budget."""
    found = [path for folder in directory.glob("teneral-parts-*") for path in folder.iterdir()]
    return [path for path in found if len(path.name) == 64 or path.name.startswith(TEMPORARY_PREFIX)]


def disk_bytes(directory: Path) -> int:
    """What they take, while others may be writing."""
    while True:
        with suppress(FileNotFoundError):  # renamed or evicted while they are added up
            return sum(-(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES for path in files_of(directory))


class Node(RuleBasedStateMachine):
    """Loads that come and go on one node, any number at a time, while files are damaged, cut and lost."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="teneral-test-"))
        self.loads: list[PartCache] = []
        self.damaged: set[str] = set()  # names of files that this test changed

    def teardown(self) -> None:
        for load in self.loads:
            load.finish()
            assert load.join(WAIT_S)
        shutil.rmtree(self.directory)

    @rule()
    def start_a_load(self) -> None:
        self.loads.append(PartCache(self.directory, budget_bytes=BUDGET_BYTES))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), number=numbers)
    def read_a_part(self, data: st.DataObject, number: int) -> None:
        """Read like a load: from the cache, else from the store; what is wrong in the cache, from the store, too."""
        load = data.draw(st.sampled_from(self.loads))
        start = data.draw(st.integers(0, len(PARTS[number]) - 1))
        buffer = bytearray(PARTS[number])
        found = load.read_into(DIGESTS[number], start, memoryview(buffer)[start:])
        if found and blake3(buffer).digest() != DIGESTS[number]:
            assert DIGESTS[number].hex() in self.damaged, "an undamaged file is wrong"
            assert load.reject(DIGESTS[number])
            assert not load.read_into(DIGESTS[number], start, memoryview(buffer)[start:])
        load.offer(DIGESTS[number], memoryview(PARTS[number]))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_loads(self, data: st.DataObject) -> None:
        """Several at once, so that they write at the same time."""
        ending = data.draw(st.lists(st.sampled_from(self.loads), min_size=1, unique=True))
        for load in ending:
            load.finish()
        for load in ending:
            assert load.join(WAIT_S)
            self.loads.remove(load)

    @rule(number=numbers, how=st.sampled_from(["flip", "cut", "empty", "lose", "age"]))
    def damage_a_part(self, number: int, how: str) -> None:
        for folder in self.directory.glob("teneral-parts-*"):
            with suppress(FileNotFoundError):  # not written yet, or evicted
                self._damage(folder / DIGESTS[number].hex(), how)

    def _damage(self, path: Path, how: str) -> None:
        if how == "lose":
            path.unlink()
        elif how == "age":
            os.utime(path, ns=(0, 0))
        else:
            self.damaged.add(path.name)
            content = bytearray(path.read_bytes())
            if how == "flip" and content:
                content[len(content) // 2] ^= 1
            kept = {"flip": len(content), "cut": len(content) // 2, "empty": 0}[how]
            with path.open("r+b") as file:
                file.write(content)
                file.truncate(kept)

    @precondition(lambda self: not self.loads)
    @rule(size_bytes=st.integers(0, 40_000), old=st.booleans())
    def a_writer_dies(self, size_bytes: int, old: bool) -> None:
        for folder in self.directory.glob("teneral-parts-*"):
            if disk_bytes(self.directory) + size_bytes + PAGE_BYTES > BUDGET_BYTES:
                return  # it would have made room first
            leftover = folder / f"{TEMPORARY_PREFIX}{random.randbytes(8).hex()}"
            leftover.write_bytes(bytes(size_bytes))
            (folder / "lock").write_bytes(b"")  # what it reserved is in no count
            if old:
                at_s = time.time() - TEMPORARY_LIFE_S - 60
                os.utime(leftover, (at_s, at_s))

    @invariant()
    def the_budget_holds(self) -> None:
        assert disk_bytes(self.directory) <= BUDGET_BYTES

    @invariant()
    def whole_files_hold_what_their_names_say(self) -> None:
        for path in files_of(self.directory):
            if not path.name.startswith(TEMPORARY_PREFIX) and path.name not in self.damaged:
                try:
                    content = path.read_bytes()
                except FileNotFoundError:
                    continue
                assert blake3(content).hexdigest() == path.name


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


CRASHER = """
# Writes two parts into a folder of its own, and dies before the N-th call to the system, for every N there is.
import fcntl, json, os, pathlib, signal, sys
from blake3 import blake3
from teneral.loader.cache import folder
from teneral.loader.cache.folder import CacheFolder

folder.FREE_SHARE = 1 << 62  # as the tests' own process has it
PARTS = [bytes([number]) * 20_000 for number in (1, 2)]
CALLS = "open stat mkdir ftruncate pread pwrite lseek write rename unlink close scandir".split()

def die_at(number):
    seen = 0
    def counted(call):
        def dying(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if call is write:
                args = (args[0], args[1][:7_000])  # so that it can die in the middle of a file
            return call(*args, **kwargs)
        return dying
    write = os.write
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)

root, number, died = pathlib.Path(sys.argv[1]), 0, True
while died:
    number += 1
    child = os.fork()
    if child == 0:
        die_at(number)
        folder = CacheFolder(root / str(number), budget_bytes=12 * 4096)
        for data in PARTS:
            assert folder.write(blake3(data).digest(), memoryview(data))
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
print(json.dumps(number - 1))
"""


def test_a_process_killed_at_any_point_leaves_only_whole_parts_and_a_usable_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=True,
    )
    num_points = json.loads(done.stdout)
    assert num_points > 30
    parts = [bytes([number]) * 20_000 for number in (1, 2)]
    num_found = set()
    for number in range(1, num_points + 1):
        directory = tmp_path / str(number)
        if not directory.exists():
            continue
        assert disk_bytes(directory) <= 12 * PAGE_BYTES
        cache = PartCache(directory, budget_bytes=BUDGET_BYTES)
        found = [
            cache.read_into(blake3(data).digest(), 0, memoryview(bytearray(len(data)))) for data in parts
        ]
        num_found.add(sum(found))
        for path in files_of(directory):
            if not path.name.startswith(TEMPORARY_PREFIX):
                assert blake3(path.read_bytes()).hexdigest() == path.name, f"killed at call {number}"
        other = b"another part" * 100
        assert cache.offer(blake3(other).digest(), memoryview(other))
        cache.finish()
        assert cache.join(WAIT_S)
        assert cache.statistics().num_written == 1, f"the folder is unusable after call {number}"
        assert cache.statistics().troubles == ()
        assert disk_bytes(directory) <= BUDGET_BYTES
    assert num_found == {0, 1, 2}


HAMMER = """
# Writes and reads parts at random until it is killed.
import pathlib, random, sys
from blake3 import blake3
from teneral.loader.cache import folder as cache_folder
from teneral.loader.cache.folder import CacheFolder

cache_folder.FREE_SHARE = 1 << 62  # as the tests' own process has it
parts = [random.Random(seed).randbytes(1000 * seed) for seed in range(1, 40)]
print("ready", flush=True)
while True:
    folder = CacheFolder(sys.argv[1], budget_bytes=int(sys.argv[2]))
    for data in random.sample(parts, 20):
        digest = blake3(data).digest()
        with folder.opened(digest) as entry:
            found = entry is not None and pathlib.Path(f"/proc/self/fd/{entry[0]}").stat().st_size
        assert found in (False, len(data)), "a half-written part is visible"
        if not found:
            folder.write(digest, memoryview(data))
"""


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_write_evict_and_die_side_by_side_keep_the_budget(tmp_path: Path, seed: int) -> None:
    budget_bytes = 60 * PAGE_BYTES
    command = [sys.executable, "-c", HAMMER, str(tmp_path), str(budget_bytes)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        until_s = time.monotonic() + random.Random(seed).uniform(0.2, 0.4)
        num_looks = 0
        while time.monotonic() < until_s:
            assert disk_bytes(tmp_path) <= budget_bytes
            num_looks += 1
    finally:
        for child in children:
            child.kill()
        ends = [
            (child.communicate(timeout=patience_s(10))[1].decode(), child.returncode) for child in children
        ]
    assert ends == [("", -signal.SIGKILL)] * 3
    assert num_looks > 0
    assert disk_bytes(tmp_path) <= budget_bytes
    for path in files_of(tmp_path):
        if not path.name.startswith(TEMPORARY_PREFIX):
            assert blake3(path.read_bytes()).hexdigest() == path.name
