"""Whole loads over a store that fails: what arrives is what was packed, bit for bit, or it is refused by name."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.faulty_loads import FaultyStore, faulty_store, first_ranges
from tests.support.inspection import connections_of
from tests.support.load import longest_standstill, patience_s, slowdown
from tests.support.store_certificate import write_certificate
from tests.support.store_fault_mix import FaultMix, RandomFaults
from tests.support.store_faults import Fault, FaultHook
from tests.support.store_http import Request

from teneral.loader.errors import (
    IntegrityError,
    SourceClosedError,
    TeneralError,
    UnavailableError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.http.stragglers import FREE_HEDGES, HEDGE_SHARE

PASSING = {
    "cut": Fault(cut_after_bytes=5_000),
    "cut before the first byte": Fault(cut_after_bytes=0),
    "stall": Fault(stall_after_bytes=5_000),
    "no first byte": Fault(stall_after_bytes=0),
    "no answer": Fault(first_byte_s=60),
    "late answer": Fault(first_byte_s=0.4),
    "trickle": Fault(rate_bytes_s=2_000),
    "busy": Fault(status=503, code="SlowDown"),
    "busy, with a wish": Fault(status=503, code="SlowDown", headers={"Retry-After": "0"}),
    "internal error": Fault(status=500),
    "dropped": Fault(drop=True),
    "another range": Fault(shift_range_bytes=-1),
    "the whole object": Fault(ignore_range=True),
    "another range's bytes": Fault(swap_range_bytes=1_000),
    "a flipped bit": Fault(flip_bit=40_003),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with faulty_store(tmp_path) as made:
        yield made


@pytest.fixture
def tls_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    certificate = write_certificate(tmp_path / "server.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with faulty_store(tmp_path, tls=tls) as made:
        yield made


# Faults that pass


def three_ranges(fault: Fault, *, after: int) -> FaultHook:
    """Wrong bytes never strike one place twice: a part may be wrong only once, and is fetched again at once."""
    hook, struck = first_ranges(3, fault, after=after), set[tuple[str, int]]()
    is_wrong = fault.flip_bit is not None or bool(fault.swap_range_bytes)

    def strike(request: Request) -> Fault | None:
        place = (request.key, request.range[0] if request.range else 0)
        if is_wrong and place in struck:
            return None
        found = hook(request)
        if found is not None:
            struck.add(place)
        return found

    return strike


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize("after", [0, 20])
def test_a_load_gets_through_a_few_faults_unharmed(store: FaultyStore, fault: Fault, after: int) -> None:
    store.set_fault(three_ranges(fault, after=after))
    store.load()


@pytest.mark.parametrize("name", ["cut", "stall", "no answer", "trickle", "a flipped bit"])
def test_the_same_holds_over_tls(tls_store: FaultyStore, name: str) -> None:
    tls_store.set_fault(three_ranges(PASSING[name], after=10))
    tls_store.load()


def test_without_faults_nothing_is_asked_for_twice(store: FaultyStore) -> None:
    done = store.load()
    assert done.web.requests == done.load.num_reads
    assert (done.web.hedges, done.web.retries, done.web.wasted_bytes, done.web.throttled) == (0, 0, 0, 0)
    assert done.web.received_bytes == done.load.stored_bytes


def test_a_range_that_stalls_is_resumed_on_another_connection_where_it_stopped(store: FaultyStore) -> None:
    store.set_fault(first_ranges(1, Fault(stall_after_bytes=5_000), after=20))
    done = store.load()
    assert (done.web.hedges, done.web.hedges_won, done.web.resumed, done.web.retries) == (1, 1, 1, 0)
    assert done.web.wasted_bytes == 0
    stalled = next(entry for entry in store.server.log() if entry.sent_bytes == 5_000)
    assert stalled.start is not None
    again = [entry for entry in store.server.log() if entry.start == stalled.start + 5_000]
    assert [entry.end for entry in again] == [stalled.end]
    assert again[0].connection != stalled.connection


def test_an_answer_that_is_late_but_sooner_than_the_second_one_wins(store: FaultyStore) -> None:
    late = iter([Fault(first_byte_s=0.45), Fault(first_byte_s=60)])
    store.set_fault(lambda request: next(late, None) if request.range else None)
    done = store.load(connections=1, hedge_after_s=0.2)
    assert (done.web.hedges, done.web.hedges_won) == (1, 0)


def test_a_second_answer_that_is_silent_too_is_asked_for_a_third_time(store: FaultyStore) -> None:
    store.set_fault(first_ranges(2, Fault(first_byte_s=60)))
    done = store.load(connections=1)
    assert (done.web.hedges, done.web.hedges_won, done.web.retries) == (2, 1, 0)


def test_with_hedging_off_a_silent_connection_is_left_at_the_time_limit(store: FaultyStore) -> None:
    store.set_fault(first_ranges(2, Fault(stall_after_bytes=5_000), after=4))
    done = store.load(hedge_after_s=0, read_timeout_s=0.3 * slowdown())
    assert (done.web.hedges, done.web.retries, done.web.resumed) == (0, 2, 2)


def test_with_hedging_off_a_trickle_is_cut_at_the_lowest_rate_and_resumed(store: FaultyStore) -> None:
    store.set_fault(first_ranges(2, Fault(rate_bytes_s=5_000), after=4))
    done = store.load(hedge_after_s=0, read_timeout_s=0.3 * slowdown(), min_rate_bytes_s=10_000)
    assert done.web.retries == 2
    assert done.web.resumed == 2


def test_a_connection_that_swallows_packets_costs_no_more_than_a_hedge(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as hole, socket.socket() as filler:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        filler.connect(hole.getsockname())  # the queue is full: further SYNs are dropped
        known = socket.getaddrinfo
        dead, alive = hole.getsockname()[1], int(store.url.split(":")[2].split("/")[0])

        def both(host: str, port: int, **options: Any) -> list[Any]:
            return [found for each in (dead, alive) for found in known(host, each, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        done = store.load(connect_timeout_s=60.0)
    assert done.web.hedges >= 1
    assert done.web.retries == 0


def test_connections_that_all_die_at_once_are_replaced(store: FaultyStore) -> None:
    store.set_fault(lambda request: Fault(first_byte_s=60) if request.connection <= 4 else None)
    done = store.load(connections=4)
    assert done.web.hedges_won >= 4
    assert done.web.retries == 0


def test_on_a_slow_link_nothing_is_asked_for_twice(tmp_path: Path) -> None:
    for _ in range(5):  # but by a load during which the machine stood still
        with faulty_store(tmp_path, rate_mb_s=1.0) as store, longest_standstill() as standstill_s:
            done = store.load()
        if standstill_s[0] < 0.1:
            break
    assert done.web.hedges == 0
    assert done.web.requests == done.load.num_reads


def test_a_store_that_pauses_for_everybody_is_hardly_asked_more(store: FaultyStore) -> None:
    ends_s = time.monotonic() + 0.8
    store.set_fault(lambda request: Fault(first_byte_s=max(0.0, ends_s - request.received_s)))
    done = store.load(connections=8)
    assert done.web.hedges <= 4


def of_blob(name: str, hook: FaultHook) -> FaultHook:
    return lambda request: hook(request) if name in (request.key or "") else None


def test_many_faults_of_all_kinds_at_once_are_survived_within_the_budgets(store: FaultyStore) -> None:
    mix = FaultMix(
        seed=1, stall_share=0.02, cut_share=0.05, late_share=0.02, trickle_share=0.02, busy_share=0.05
    )
    random_faults = RandomFaults(mix)
    # Not at random, and of different blobs, as a part may be wrong only once.
    flips = of_blob("draft", first_ranges(1, Fault(flip_bit=1_003), after=20))
    swaps = of_blob("refine", first_ranges(1, Fault(swap_range_bytes=512), after=20))
    store.set_fault(lambda request: flips(request) or swaps(request) or random_faults(request))
    done = store.load(range_bytes=10_000)
    assert done.load.num_refetched_parts > 0
    assert done.web.retries > 0
    assert done.web.hedges <= FREE_HEDGES + HEDGE_SHARE * done.web.requests


@pytest.mark.parametrize("after", [0, 20])
def test_a_storm_of_503_is_waited_out_and_hardly_asked_into(store: FaultyStore, after: int) -> None:
    store.set_fault(RandomFaults(FaultMix(storm_s=0.3, storm_after=after)))
    done = store.load(connections=8)
    refused = [entry for entry in store.server.log() if entry.status == 503]
    assert len(refused) == done.web.throttled > 0
    # Those that were under way at first, then half as many each time, and in the end one at a time.
    assert len(refused) <= 8 + 4 + 2 + 1 + 10
    assert done.web.requests <= done.load.num_reads + done.web.retries + done.web.hedges
    assert done.web.retries <= len(refused)
    assert done.web.wasted_bytes == 0


def test_a_storm_over_connections_with_a_cap_and_a_mix_of_faults_is_survived(tmp_path: Path) -> None:
    mix = FaultMix(seed=2, storm_s=0.2, storm_after=30, cut_share=0.05, busy_share=0.05, stall_share=0.02)
    with faulty_store(tmp_path, connection_rate_mb_s=1.0) as store:
        store.set_fault(RandomFaults(mix))
        done = store.load(connections=8, range_bytes=10_000)
    assert done.web.throttled > 0
    assert done.web.hedges <= FREE_HEDGES + HEDGE_SHARE * done.web.requests
    assert done.web.requests <= done.load.num_reads + done.web.retries + done.web.hedges


def test_connections_that_are_all_capped_are_not_asked_twice(tmp_path: Path) -> None:
    with faulty_store(tmp_path, connection_rate_mb_s=0.5) as store:
        done = store.load(connections=8, hedge_after_s=0.5)
    assert (done.web.hedges, done.web.retries, done.web.wasted_bytes) == (0, 0, 0)
    assert done.web.requests == done.load.num_reads


def test_of_connections_with_different_caps_the_slow_ones_are_left(store: FaultyStore) -> None:
    store.set_fault(RandomFaults(FaultMix(slow_connections=2, slow_connection_kb_s=10.0)))
    done = store.load(connections=4)
    assert done.web.hedges_won >= 2
    assert done.web.retries == 0
    assert done.web.hedges <= FREE_HEDGES
    assert done.web.requests <= done.load.num_reads + done.web.hedges


def test_closing_ends_a_read_whose_two_answers_are_both_silent(store: FaultyStore) -> None:
    asked, errors = threading.Semaphore(0), []

    def hook(_: Request) -> Fault:
        asked.release()
        return Fault(first_byte_s=60)

    store.set_fault(hook)
    source = HttpSource(store.url, SourceOptions(hedge_after_s=0.05))

    def read() -> None:
        try:
            source.read_into(store.built.manifest.blobs[0].name, 0, memoryview(bytearray(1_000)))
        except SourceClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(2):
        assert asked.acquire(timeout=patience_s(10))
    source.close()
    thread.join(patience_s(10))
    assert len(errors) == 1
    assert connections_of(source).statistics().in_use == 0


# Faults that stay


STAYING = {
    "cut": (Fault(cut_after_bytes=0), UnavailableError, "closed the connection too early"),
    "busy": (Fault(status=503, code="SlowDown"), UnavailableError, "answers 503"),
    "silent": (Fault(stall_after_bytes=0), UnavailableError, "sent nothing for 0.2 s"),
    "another range": (Fault(shift_range_bytes=-1), UnavailableError, "answers with other bytes"),
    "the whole object": (Fault(ignore_range=True), UnavailableError, "the whole of"),
    "another range's bytes": (Fault(swap_range_bytes=1_000), IntegrityError, "digest"),
    "a flipped bit": (Fault(flip_bit=40_003), IntegrityError, "digest"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "words"), STAYING.values(), ids=STAYING)
def test_a_fault_that_stays_is_refused_and_names_part_and_object(
    store: FaultyStore, fault: Fault, kind: type[TeneralError], words: str
) -> None:
    store.set_fault(first_ranges(1_000_000, fault, after=10))
    with pytest.raises(kind, match=r"part \d+ \(layers\.\d .*of blobs/(draft|refine)-000.*") as caught:
        store.load(max_attempts=2, outage_s=0, read_timeout_s=0.2)
    assert words in str(caught.value)


def test_a_source_of_which_too_much_fails_is_refused_and_says_so(store: FaultyStore) -> None:
    """Each range would get through in the end; the store is spared that."""
    asked: set[tuple[str, int]] = set()

    def hook(request: Request) -> Fault | None:
        place = (request.key, request.range[0] if request.range else 0)
        is_first = place not in asked
        asked.add(place)
        return Fault(status=500) if is_first else None

    store.set_fault(hook)
    with pytest.raises(UnavailableError, match="too many requests to this source fail"):
        store.load(range_bytes=4_096)
    assert len(store.server.log()) < 120
