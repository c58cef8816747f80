"""A load in a process of its own equals one in this process, and no reader waits for a dead child."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_store
from tests.support.inspection import child_of
from tests.support.load import patience_s
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.weight_loads import start_process_load

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    InsufficientMemoryError,
    IntegrityError,
    LoadCancelledError,
    ManifestError,
    NotFoundError,
    TeneralError,
    UnavailableError,
)
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.launch import is_possible
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
pytestmark = pytest.mark.skipif(not is_possible(), reason="this system has no memory files")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process")
    pack(model_store(llama_contents(num_layers=3)), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture
def artifact(folder: Path) -> Path:
    return folder / "bucket" / "model"


@pytest.fixture
def slow(folder: Path) -> Iterator[str]:
    """The artifact behind a server that stalls in the middle of every blob."""

    def stall(request: object) -> Fault | None:
        return Fault(stall_after_bytes=1000, stall_s=WAIT_S) if "blobs" in str(request) else None

    with StoreServer(folder, fault=stall) as server:
        yield f"{server.url}/bucket/model"
        server.drop_connections()


def last_group(manifest: Manifest) -> int:
    return manifest.groups[-1].index


def test_the_weights_are_those_of_a_load_in_this_process(artifact: Path) -> None:
    source = FileStore(artifact)
    manifest = open_artifact(source)
    here = WeightLoad(source, manifest)
    here.start()
    there = start_process_load(str(artifact))
    assert there.manifest == manifest
    for group in manifest.groups:
        here.wait(group.index, timeout_s=WAIT_S)
        there.wait(group.index, timeout_s=WAIT_S)
        assert there.is_ready(group.index)
        assert there.slab(group.index).tobytes() == here.slab(group.index).tobytes()
    assert there.join(WAIT_S)
    assert there.progress().state is LoadState.EXACT
    statistics = there.statistics()
    assert statistics is not None
    assert statistics.stored_bytes == here.statistics().stored_bytes


def test_the_weights_outlive_the_child_and_the_load(artifact: Path) -> None:
    load = start_process_load(str(artifact))
    load.wait(0, timeout_s=WAIT_S)
    slab = load.slab(0)
    content = slab.tobytes()
    assert load.join(WAIT_S)
    load.close()
    del load
    assert slab.tobytes() == content
    assert any(content)


def test_the_timeline_has_the_childs_spans_on_this_processs_clock(artifact: Path) -> None:
    timeline = Timeline()
    began_s = timeline.now_s()
    load = start_process_load(str(artifact), timeline=timeline)
    load.wait(last_group(load.manifest), timeout_s=WAIT_S)
    assert load.join(WAIT_S)
    spans = [span for span in timeline.spans() if span.lane in ("fetch", "verify", "decode", "ready")]
    assert {span.lane for span in spans} == {"fetch", "verify", "decode", "ready"}
    assert all(began_s <= span.start_s <= span.end_s <= timeline.now_s() for span in spans)


def test_parts_can_be_waited_for_alone(artifact: Path) -> None:
    load = start_process_load(str(artifact), options=LoadOptions(on_demand=True))
    table = RowParts(load.manifest, "model.embed_tokens.weight")
    load.wait_parts(table.holding([0, 5]), timeout_s=WAIT_S)
    assert load.join(WAIT_S)
    load.wait_parts(table.all, timeout_s=WAIT_S)  # requested when no process can answer any more


def test_a_wish_reaches_the_child_while_it_waits_for_the_store(slow: str) -> None:
    load = start_process_load(slow, options=LoadOptions(on_demand=True))
    with pytest.raises(TimeoutError, match="1 parts were not there"):
        load.wait_parts([0], timeout_s=0.2)
    load.cancel()
    with pytest.raises(LoadCancelledError):
        load.wait_parts([0], timeout_s=WAIT_S)
    load.close()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    load = start_process_load(str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="nowhere") as caught:
        _ = load.manifest
    assert caught.value.hint
    assert load.join(WAIT_S)


def test_a_damaged_part_is_refused_with_all_that_its_error_says(folder: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    pack(model_store(llama_contents(num_layers=1)), store)
    blob = next(tmp_path.rglob("draft-000.bin"))
    data = bytearray(blob.read_bytes())
    data[-100] ^= 1
    blob.write_bytes(data)
    load = start_process_load(str(tmp_path))
    with pytest.raises(IntegrityError, match="draft") as caught:
        load.wait(last_group(load.manifest), timeout_s=WAIT_S)
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.where


@pytest.mark.parametrize(
    "error",
    [
        InsufficientMemoryError("no room", needed_bytes=2, available_bytes=1, hint="Less."),
        UnavailableError("busy", source="s3://b", name="x", hint="Later.", retry_after_s=3.0),
        ManifestError("bad", where="manifest.json"),
    ],
)
def test_errors_cross_processes_whole(error: TeneralError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_a_killed_child_fails_waiting_readers_with_the_reason(slow: str) -> None:
    load = start_process_load(slow)
    manifest = load.manifest
    os.kill(child_of(load).pid, signal.SIGKILL)
    with pytest.raises(TeneralError, match="signal 9") as caught:
        load.wait(last_group(manifest), timeout_s=WAIT_S)
    assert "memory" in caught.value.hint
    load.close()


def test_cancelling_ends_the_child_and_waiting_readers(slow: str) -> None:
    load = start_process_load(slow)
    manifest = load.manifest
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            load.wait(last_group(manifest), timeout_s=WAIT_S)
        except TeneralError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    load.cancel()
    waiter.join(WAIT_S)
    assert [type(error) for error in errors] == [LoadCancelledError]
    assert load.join(WAIT_S)
    assert child_of(load).wait() == -signal.SIGKILL


def test_the_child_ends_when_its_parent_is_killed(slow: str) -> None:
    program = (
        "import sys, time\n"
        "from tests.support.weight_loads import start_process_load\n"
        f"load = start_process_load({slow!r})\n"
        "load.manifest\n"
        "print(load._child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_id = int(parent.stdout.readline())
    child = os.pidfd_open(child_id)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended = threading.Event()

    def wait() -> None:
        # A process that is not our own child can be waited for through its descriptor: it turns readable.
        select.select([child], [], [], WAIT_S)
        ended.set()

    threading.Thread(target=wait).start()
    assert ended.wait(WAIT_S + 1)
    os.close(child)
    assert not Path(f"/proc/{child_id}/task").exists() or "Z" in Path(f"/proc/{child_id}/stat").read_text()


def test_options_reach_the_child(artifact: Path) -> None:
    load = start_process_load(str(artifact), options=LoadOptions(available_bytes=1))
    with pytest.raises(InsufficientMemoryError):
        load.wait(0, timeout_s=WAIT_S)


def test_a_stopped_child_that_reads_no_messages_keeps_no_load_from_its_end(slow: str) -> None:
    load = start_process_load(slow)
    assert load.manifest
    os.kill(child_of(load).pid, signal.SIGSTOP)
    num_sent = 0

    def send() -> None:
        nonlocal num_sent
        for number in range(100_000):
            load.reorder(Order.EXACT)
            num_sent = number

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    before = -1
    while num_sent != before:  # until the socket is full
        before = num_sent
        sender.join(0.2)
    assert sender.is_alive()
    closer = threading.Thread(target=load.close, daemon=True)
    closer.start()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    sender.join(WAIT_S)
    assert not sender.is_alive()
