"""The test server itself: what the other tests take for granted about it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import boto3
import pytest
from botocore.exceptions import ClientError
from tests.support.load import patience_s
from tests.support.store_fault_mix import FaultMix, RandomFaults
from tests.support.store_faults import Fault
from tests.support.store_http import Request as ServerRequest
from tests.support.store_pacing import SLICE_BYTES, Pacer
from tests.support.store_server import StoreServer

DATA = bytes(range(256)) * 1000
WAIT_S = patience_s(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "b" / "folder").mkdir(parents=True)
    (tmp_path / "b" / "folder" / "x y").write_bytes(DATA)
    with StoreServer(tmp_path) as started:
        yield started


@pytest.fixture
def client(server: StoreServer) -> Iterator[Any]:
    made = boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    yield made
    made.close()


def get(server: StoreServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = Request(
        server.url + path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urlopen(request) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [("bytes=0-9", 0, 10), ("bytes=1000-", 1000, len(DATA)), ("bytes=-7", len(DATA) - 7, len(DATA))],
)
def test_ranges_are_answered_as_http_wants_it(server: StoreServer, wanted: str, start: int, end: int) -> None:
    status, body, headers = get(server, "/b/folder/x%20y", Range=wanted)
    assert (status, body) == (206, DATA[start:end])
    assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(DATA)}"


def test_conditions_and_ends_are_respected(server: StoreServer) -> None:
    etag = get(server, "/b/folder/x%20y")[2]["ETag"]
    assert get(server, "/b/folder/x%20y", If_Match=etag)[0] == 200
    assert get(server, "/b/folder/x%20y", If_Match='"other"')[0] == 412
    assert get(server, "/b/folder/x%20y", If_None_Match=etag)[0] == 304
    assert get(server, "/b/folder/x%20y", Range=f"bytes={len(DATA)}-")[0] == 416
    assert get(server, "/b/none")[0] == 404
    assert get(server, "/b/%2e%2e/%2e%2e/etc/passwd")[0] == 400


def test_boto3_can_do_with_it_what_it_does_with_s3(client: Any) -> None:
    client.create_bucket(Bucket="new")
    client.put_object(Bucket="new", Key="dir/ü+ &<>.bin", Body=DATA)
    assert client.get_object(Bucket="new", Key="dir/ü+ &<>.bin")["Body"].read() == DATA
    assert client.head_object(Bucket="new", Key="dir/ü+ &<>.bin")["ContentLength"] == len(DATA)
    upload = client.create_multipart_upload(Bucket="new", Key="large")["UploadId"]
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(
                Bucket="new", Key="large", UploadId=upload, PartNumber=number, Body=DATA[:number]
            )["ETag"],
        }
        for number in (1, 2)
    ]
    client.complete_multipart_upload(
        Bucket="new", Key="large", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert client.get_object(Bucket="new", Key="large")["Body"].read() == DATA[:1] + DATA[:2]
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="new", Key="large", Body=b"", IfNoneMatch="*")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="new", PaginationConfig={"PageSize": 1})
    assert [found["Key"] for page in pages for found in page["Contents"]] == ["dir/ü+ &<>.bin", "large"]
    client.delete_object(Bucket="new", Key="large")
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket="new", Key="large")


def test_the_log_tells_what_was_asked_for(server: StoreServer) -> None:
    get(server, "/b/folder/x%20y", Range="bytes=5-9")
    entry = server.log()[0]
    assert (entry.method, entry.bucket, entry.key) == ("GET", "b", "folder/x y")
    assert (entry.start, entry.end, entry.status, entry.sent_bytes) == (5, 10, 206, 5)
    assert entry.done_s is not None
    assert entry.done_s >= entry.received_s


@pytest.mark.parametrize("bit", [0, 7, 8 * 1234 + 5, 8 * 9900 - 1])
def test_a_flipped_bit_is_the_only_one(server: StoreServer, bit: int) -> None:
    server.set_fault(lambda _: Fault(flip_bit=bit))
    body = get(server, "/b/folder/x%20y", Range="bytes=100-9999")[1]
    sent, stored = int.from_bytes(body, "little"), int.from_bytes(DATA[100:10_000], "little")
    assert sent ^ stored == 1 << bit


def test_swapped_bytes_carry_the_label_of_what_was_asked_for(server: StoreServer) -> None:
    server.set_fault(lambda _: Fault(swap_range_bytes=3))
    _, body, headers = get(server, "/b/folder/x%20y", Range="bytes=100-199")
    assert headers["Content-Range"] == f"bytes 100-199/{len(DATA)}"
    assert body == DATA[103:203]


def test_an_answer_comes_late_and_slowly_when_it_should(server: StoreServer) -> None:
    server.set_fault(lambda _: Fault(first_byte_s=0.1, rate_bytes_s=100_000))
    began_s = time.monotonic()
    assert get(server, "/b/folder/x%20y", Range="bytes=0-9999")[1] == DATA[:10_000]
    assert time.monotonic() - began_s >= 0.15  # the pacer gives a little credit


def test_a_client_that_leaves_a_silent_answer_is_let_go(server: StoreServer) -> None:
    server.set_fault(lambda _: Fault(stall_after_bytes=100, stall_s=3600))
    with urlopen(f"{server.url}/b/folder/x%20y") as answer:
        assert answer.read(100) == DATA[:100]
    assert [entry.sent_bytes for entry in server.log()] == [100]
    assert server.log()[0].done_s is not None


def ranges(number: int) -> list[ServerRequest]:
    return [
        ServerRequest(serial, 1 + serial % 8, "GET", "b", "x", {}, {"range": "bytes=0-999"}, float(serial))
        for serial in range(number)
    ]


def test_random_faults_strike_their_share_of_the_ranges_and_the_same_ones_again() -> None:
    mix = FaultMix(seed=3, stall_share=0.05, busy_share=0.2)
    struck = [RandomFaults(mix)(request) for request in ranges(2000)]
    assert 60 < sum(fault is not None and fault.stall_after_bytes is not None for fault in struck) < 140
    assert 320 < sum(fault is not None and fault.status == 503 for fault in struck) < 480
    assert struck == [RandomFaults(mix)(request) for request in ranges(2000)]
    assert struck != [RandomFaults(replace(mix, seed=4))(request) for request in ranges(2000)]


def test_flips_and_swaps_can_come_regularly() -> None:
    flips, swaps = RandomFaults(FaultMix(flip_every=10)), RandomFaults(FaultMix(swap_every=20))
    struck = [(flips(request), swaps(request)) for request in ranges(40)]
    assert [serial for serial, (flip, _) in enumerate(struck) if flip] == [10, 20, 30]
    assert [serial for serial, (_, swap) in enumerate(struck) if swap] == [10, 30]
    assert all(flip.flip_bit is not None for flip, _ in struck if flip)
    assert all(swap.swap_range_bytes for _, swap in struck if swap)


def test_a_storm_begins_and_ends() -> None:
    faults = RandomFaults(FaultMix(storm_s=10, storm_after=5))
    assert [serial for serial, request in enumerate(ranges(30)) if faults(request)] == list(range(5, 15))


def test_first_connections_are_slow_or_die_after_one_range() -> None:
    slow = RandomFaults(FaultMix(slow_connections=2, slow_connection_kb_s=5))
    assert {request.connection for request in ranges(30) if slow(request)} == {1, 2}
    dead = RandomFaults(FaultMix(dead_connections=1))
    assert [serial for serial, request in enumerate(ranges(20)) if dead(request)] == [8, 16]


def test_bytes_never_leave_faster_than_the_rate_over_all_connections(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(bytes(500_000))
    with StoreServer(tmp_path, rate_mb_s=20) as server:
        began_s = time.monotonic()
        threads = [threading.Thread(target=get, args=(server, "/b/x")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began_s >= 2_000_000 / 20e6 - 0.01


def test_a_pacer_never_gives_more_than_the_rate() -> None:
    pacer, began_s = Pacer(100), time.monotonic()
    for _ in range(40):
        pacer.wait(SLICE_BYTES)
    assert time.monotonic() - began_s >= 40 * SLICE_BYTES / 100e6 - 0.006


def test_the_first_byte_is_late_by_the_latency(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"1")
    with StoreServer(tmp_path, latency_ms=50) as server:
        began_s = time.monotonic()
        assert get(server, "/b/x")[1] == b"1"
        assert time.monotonic() - began_s >= 0.05


def test_it_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.store_server",
        "--root",
        str(tmp_path),
        "--bucket",
        "made",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urlopen(f"{url}/made?list-type=2") as answer:
            assert b"<KeyCount>0</KeyCount>" in answer.read()
        process.terminate()
    assert process.returncode == 0


def test_it_says_how_many_bytes_it_has_sent_while_it_serves(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"12345")
    command = [sys.executable, "-m", "tests.support.store_server", "--root", str(tmp_path), "--tell-sent"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        counts = set()
        for _ in range(2):
            with urlopen(f"{url}/b/x") as answer:
                answer.read()
        until_s = time.monotonic() + WAIT_S
        while 10 not in counts and time.monotonic() < until_s:  # the client has a byte before it is noted
            process.stdin.write("\n")
            counts.add(int(process.stdout.readline()))
        process.terminate()
    assert max(counts) == 10
    assert process.returncode == 0


def test_bytes_of_an_answer_that_was_cut_are_counted_as_far_as_they_went(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(bytes(100))
    with StoreServer(tmp_path, fault=lambda request: Fault(cut_after_bytes=40)) as server:
        with pytest.raises(IncompleteRead):
            get(server, "/b/x")
        server.log()  # waits for what is being sent
        assert server.sent_bytes() == 40
