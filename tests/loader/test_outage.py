"""Outages: a store that is away for a while is waited for by all readers together, and the timeline shows it."""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.faulty_loads import LAYERS, FaultyStore, faulty_store, first_ranges
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer
from tests.support.weight_loads import start_process_load

from teneral.loader.errors import NotFoundError, UnavailableError
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.outage import Outage, show_outages
from teneral.loader.sources.http.retry import MAX_PAUSE_S, Throttle, TokenBucket, _Tries, pause_s
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.s3.store import S3Store
from teneral.loader.timeline import Timeline

AWAY_S = 1.5
PATIENT = {"max_attempts": 3, "outage_s": 120.0}  # three attempts alone would end at once
WAIT_S = 120.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def readers(clock: Clock, number: int, **options: object) -> tuple[Outage, list[_Tries]]:
    outage = Outage(clock=clock)
    budget = TokenBucket(at_first=1_000, share=0.1, most=1_000)
    chosen = SourceOptions(**options)
    return outage, [_Tries(chosen, outage, budget) for _ in range(number)]


def test_thirty_seconds_of_refusals_are_waited_out_by_all_readers(clock: Clock) -> None:
    _, tries = readers(clock, 8)
    for _ in range(60):
        assert [each.failed("refused", is_outage=True) for each in tries] == [""] * 8
        clock.now_s += 0.5
    assert clock.now_s == 130.0
    whys = [each.failed("refused", is_outage=True) for each in tries]
    assert all("nothing has come for 30 s" in why for why in whys)


def test_one_reader_that_begins_late_does_not_begin_the_clock_anew(clock: Clock) -> None:
    _, (first, late) = readers(clock, 2, max_attempts=3)
    assert first.failed("refused", is_outage=True) == ""
    clock.now_s += 40
    assert late.failed("refused", is_outage=True) == ""
    assert "nothing has come for 40 s" in late.failed("refused", is_outage=True)


def test_a_read_that_fails_while_others_succeed_is_counted(clock: Clock) -> None:
    outage, (one,) = readers(clock, 1)
    for _ in range(5):
        assert one.failed("cut", is_outage=True) == ""
        outage.succeeded()  # another reader's
    assert one.failed("cut", is_outage=True) == "after 6 attempts"


def test_an_answer_that_makes_no_sense_is_no_outage(clock: Clock) -> None:
    _, (one,) = readers(clock, 1, max_attempts=3)
    assert [one.failed("other bytes", is_outage=False) for _ in range(2)] == ["", ""]
    assert one.failed("other bytes", is_outage=False) == "after 3 attempts"


def test_a_read_that_others_gave_up_on_goes_on_once_something_came(clock: Clock) -> None:
    outage, (first, other) = readers(clock, 2, max_attempts=3)
    assert other.failed("refused", is_outage=True) == ""
    outage.succeeded()
    for _ in range(3):
        first.failed("refused", is_outage=True)
        clock.now_s += 30
    assert other.failed("refused", is_outage=True) == "", "its own failure was in an outage before"


def test_without_patience_attempts_are_all(clock: Clock) -> None:
    _, (one,) = readers(clock, 1, max_attempts=2, outage_s=0.0)
    assert one.failed("refused", is_outage=True) == ""
    assert one.failed("refused", is_outage=True) == "after 2 attempts"


def test_an_outage_costs_each_reader_one_retry_of_the_budget(clock: Clock) -> None:
    outage = Outage(clock=clock)
    budget = TokenBucket(at_first=1, share=0.0, most=1)
    one, other = (_Tries(SourceOptions(), outage, budget) for _ in range(2))
    assert [one.failed("refused", is_outage=True) for _ in range(50)] == [""] * 50
    assert "too many requests" in other.failed("refused", is_outage=True)


@dataclass
class Reading:
    """A read in virtual time: one attempt after another, with the pauses of `retry.py`."""

    began_s: float
    tries: _Tries
    pauses: random.Random
    ended_s: float = math.inf
    why: str = ""

    def attempt_at(self, now_s: float, *, is_up: bool, outage: Outage) -> float:
        """The time of the next attempt; infinite after the last one."""
        if is_up:
            outage.succeeded()
        else:
            self.why = self.tries.failed("503", is_outage=True)
        if is_up or self.why:
            self.tries.close()
            self.ended_s = now_s
            return math.inf
        pause = pause_s(min(self.tries.num_failed, 10), None, self.pauses.random())
        return now_s + ATTEMPT_S + pause


ATTEMPT_S = 0.5
STEP_S = ATTEMPT_S + MAX_PAUSE_S  # between two attempts, at most
OUTAGE_S = SourceOptions().outage_s


def play(
    clock: Clock, begins_s: list[float], is_up: Callable[[float], bool], seed: int
) -> tuple[Outage, list[Reading]]:
    """One load: reads that begin at these times, until all of them have ended."""
    outage, tries = readers(clock, len(begins_s))
    readings = [Reading(s, each, random.Random(seed)) for s, each in zip(begins_s, tries, strict=True)]
    for number, reading in enumerate(readings):
        reading.pauses.seed(seed + number)
    events = [(reading.began_s, number) for number, reading in enumerate(readings)]
    heapq.heapify(events)
    while events:
        clock.now_s, number = heapq.heappop(events)
        next_s = readings[number].attempt_at(clock.now_s, is_up=is_up(clock.now_s), outage=outage)
        if next_s < math.inf:
            heapq.heappush(events, (next_s, number))
    return outage, readings


BEGINS = st.lists(st.floats(0, 25), min_size=1, max_size=12)


@given(begins_s=BEGINS, seed=st.integers(0, 1 << 30))
def test_a_load_from_a_dead_store_ends_after_one_outage(begins_s: list[float], seed: int) -> None:
    """However many of its reads wait, and whichever gives up first."""
    clock = Clock()
    outage, readings = play(clock, begins_s, lambda _: False, seed)
    began_s = min(begins_s)
    for reading in readings:
        assert reading.why
        assert began_s + OUTAGE_S <= reading.ended_s <= began_s + OUTAGE_S + STEP_S
    assert outage.failed("503")[1] == 0, "nothing waits: the next read has a clock of its own"


@given(
    begins_s=BEGINS, down_s=st.floats(0, 20), lasts_s=st.floats(0, OUTAGE_S - 1), seed=st.integers(0, 1 << 30)
)
def test_no_read_fails_by_an_outage_shorter_than_the_clock(
    begins_s: list[float], down_s: float, lasts_s: float, seed: int
) -> None:
    def is_up(now_s: float) -> bool:
        return not down_s <= now_s < down_s + lasts_s

    _, readings = play(Clock(), begins_s, is_up, seed)
    for reading in readings:
        assert not reading.why
        assert reading.ended_s <= max(reading.began_s, down_s + lasts_s) + STEP_S


def test_the_timeline_shows_that_an_outage_lasts_and_its_end(clock: Clock) -> None:
    seen: list[tuple[float, float | None, str]] = []
    outage = Outage(clock=clock)
    outage.watch(lambda *note: seen.append(note))
    outage.failed("a blip")
    clock.now_s += 0.1
    outage.succeeded()
    assert seen == [], "a short one is a retry like any other"
    outage.failed("503")
    clock.now_s += 1
    outage.failed("503 again")
    clock.now_s += 1
    outage.failed("and again")
    outage.succeeded()
    assert seen == [(100.1, None, "503 again"), (100.1, 102.1, "503")]


def test_an_outage_of_one_failure_and_a_long_pause_is_shown(clock: Clock) -> None:
    seen: list[tuple[float, float | None, str]] = []
    outage = Outage(clock=clock)
    outage.watch(lambda *note: seen.append(note))
    outage.failed("503")
    clock.now_s += 1
    outage.succeeded()
    assert seen == [(100.0, None, "503"), (100.0, 101.0, "503")]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyStore]:
    with faulty_store(tmp_path_factory.mktemp("outage"), LAYERS) as made:
        yield made


@pytest.fixture
def store(shared_store: FaultyStore) -> Iterator[FaultyStore]:
    shared_store.set_fault(None)
    yield shared_store
    shared_store.set_fault(None)


def during(seconds: float, fault: Fault) -> Callable[[Request], Fault | None]:
    """Every request from now on is treated like that, for so long from the first one on."""
    ends_s: list[float] = []

    def hook(request: Request) -> Fault | None:
        if not ends_s:
            ends_s.append(time.monotonic() + seconds)
        return fault if time.monotonic() < ends_s[0] else None

    return hook


FAULTS = {
    "503": Fault(status=503, code="SlowDown"),
    "500": Fault(status=500),
    "connections that break": Fault(drop=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_answers_nothing_from_the_first_request_on_is_waited_for(
    store: FaultyStore, fault: Fault
) -> None:
    store.set_fault(during(AWAY_S, fault))
    done = store.load(**PATIENT)
    assert done.web.retries > 1


@contextmanager
def away(server: StoreServer, root: Path, seconds: float) -> Iterator[None]:
    """Stop the server, so that connections are refused, and serve the folder at its address again."""
    port = int(server.url.rpartition(":")[2])
    server.stop()
    again: list[StoreServer] = []

    def come_back() -> None:
        time.sleep(seconds)
        again.append(StoreServer(root, port=port).start())

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        again[0].stop()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_refused_connections_are_waited_for(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "blob").write_bytes(b"content")
    server = StoreServer(tmp_path).start()
    timeline = Timeline()
    with away(server, tmp_path, AWAY_S):
        source = (
            HttpSource(f"{server.url}/models", SourceOptions(**PATIENT))
            if scheme == "http"
            else S3Store("s3://models", SourceOptions(endpoint_url=server.url, region="us-east-1", **PATIENT))
        )
        show_outages(source, timeline)
        assert source.read("blob", max_bytes=100)[0] == b"content"
        source.close()
    shown = timeline.first("fetch", "waiting for the store")
    assert shown is not None
    assert shown.end_s - shown.start_s > AWAY_S / 2
    assert "ECONNREFUSED" in str(shown.attributes["reason"])


def test_a_final_answer_ends_the_waiting_at_once(store: FaultyStore) -> None:
    seen = iter(range(1_000))

    def hook(_: Request) -> Fault | None:
        return Fault(status=503) if next(seen) < 3 else Fault(status=404, code="NoSuchKey")

    store.set_fault(hook)
    source = HttpSource(store.url, SourceOptions(**PATIENT))
    with pytest.raises(NotFoundError):
        source.read("manifest.json", max_bytes=100)
    source.close()


def test_a_store_that_stays_away_ends_the_load_and_says_for_how_long(store: FaultyStore) -> None:
    store.set_fault(first_ranges(1_000_000, Fault(status=503)))
    with pytest.raises(UnavailableError, match=r"part \d+ .*nothing has come for \d+ s"):
        store.load(max_attempts=2, outage_s=0.5)


def test_a_busy_store_that_stays_away_is_asked_a_last_time_by_each_reader(store: FaultyStore) -> None:
    """Its turns, one reader at a time and seconds apart, took 26 times as long as the outage may last."""
    patience_s = 0.5
    store.set_fault(lambda _: Fault(status=503, headers={"Retry-After": "20"}))
    store.server.clear_log()
    source = HttpSource(store.url, SourceOptions(outage_s=patience_s))
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(source.read, f"blob{number}", max_bytes=100) for number in range(8)]
        for read in reads:
            with pytest.raises(UnavailableError, match=r"nothing has come for \d+ s"):
                read.result(WAIT_S)
    source.close()
    asked_s = sorted(entry.received_s for entry in store.server.log())
    late_s = [each_s for each_s in asked_s if each_s > asked_s[0] + patience_s]
    assert 0 < len(late_s) <= 2 * 8


def test_a_reader_without_patience_left_does_not_wait_for_its_turn() -> None:
    throttle = Throttle()
    throttle.refused(asked_s=time.monotonic(), wish_s=WAIT_S)
    began_s = time.monotonic()
    assert throttle.enter(lambda: began_s + 0.01 - time.monotonic())
    assert throttle.is_pausing


def test_patience_is_counted_from_the_first_failure(clock: Clock) -> None:
    outage = Outage(clock=clock)
    assert outage.left_s(30.0) == math.inf
    outage.failed("503")
    clock.now_s += 40
    assert outage.left_s(30.0) == -10.0
    assert outage.left_s(0.0) == math.inf, "without patience attempts are all"
    outage.succeeded()
    assert outage.left_s(30.0) == math.inf


def test_a_load_in_a_process_of_its_own_shows_that_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.checkpoints import llama_contents, model_store

    from teneral.loader.sources.file.store import FileStore
    from teneral.loader.tools.pack.pack import pack

    target = FileStore(tmp_path / "models" / "m")
    pack(model_store(llama_contents()), target)
    target.close()
    with StoreServer(tmp_path, fault=during(AWAY_S, Fault(status=503))) as server:
        timeline = Timeline()
        options = SourceOptions(**PATIENT)
        with start_process_load(f"{server.url}/models/m", source_options=options, timeline=timeline) as load:
            assert load.manifest.groups
            assert load.join(WAIT_S)
    names = {span.name for span in timeline.spans() if span.lane == "fetch"}
    assert {"the store does not answer", "waiting for the store"} <= names
