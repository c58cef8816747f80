"""Claims of workers that are gone: a worker that starts on the same host after a kill waits for none of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.memory_store import MemoryStore

from teneral.handlers.batch.claims import Claims, claim_name
from teneral.loader.sources.file.store import FileStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up as Linux names them")
CLAIM_IN_A_PROCESS = """
import asyncio, sys, time
from pathlib import Path
from teneral.handlers.batch.claims import Claims
from teneral.loader.sources.file.store import FileStore

assert asyncio.run(Claims(FileStore(Path(sys.argv[1]))).take(0))
print("claimed", flush=True)
time.sleep(600)
"""


def claim_of(store: MemoryStore) -> bytes:
    return store.read(claim_name(0), max_bytes=1000)[0]


def test_the_claim_of_a_process_that_was_killed_here_is_taken_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM_IN_A_PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"claimed\n"
        assert not asyncio.run(Claims(FileStore(tmp_path)).take(0)), "it lives"
        worker.kill()
        worker.wait()
    again = Claims(FileStore(tmp_path))
    assert asyncio.run(again.take(0))
    assert not again.is_waiting


def test_only_a_process_of_this_host_that_is_gone_gives_its_claim_up() -> None:
    store = MemoryStore()
    assert asyncio.run(Claims(store).take(0))
    name, writes, host, number, started = claim_of(store).split()
    for claim, is_free in (
        ((name, writes, host, number, started), False),
        ((name, writes, host, number, b"1"), True),  # another process with its number
        ((name, writes, b"0" * 16, number, b"1"), False),  # of another host, or container
        ((name, writes), False),  # an older worker's
        ((name,), False),
        ((name, writes, host, b"-1", b"1"), False),
        ((name, writes, host, b"9" * 30, b"1"), False),
    ):
        store.put(claim_name(0), b" ".join(claim))
        assert asyncio.run(Claims(store).take(0)) is is_free, claim
