"""The web client against servers that fail in every way: what it resumes, refuses, and gives up."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.load import patience_s, slowdown
from tests.support.store_certificate import write_certificate
from tests.support.store_faults import Fault, on_requests
from tests.support.store_http import Request as ServerRequest
from tests.support.store_scripted import ScriptedServer
from tests.support.store_server import StoreServer

from teneral.loader.errors import (
    AccessDeniedError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceClosedError,
    SourceError,
    UnavailableError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.source import HttpSource

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "blob").write_bytes(DATA)
    with StoreServer(tmp_path) as started:
        yield started


@pytest.fixture
def opened() -> Iterator[Callable[..., HttpSource]]:
    """Makes sources that are closed in the end."""
    sources: list[HttpSource] = []

    def open_at(url: str, **options: object) -> HttpSource:
        sources.append(HttpSource(url, SourceOptions(**options)))
        return sources[-1]

    yield open_at
    for source in sources:
        source.close()


def read(source: HttpSource, start: int = 0, end: int = len(DATA), version: str | None = None) -> bytes:
    buffer = bytearray(end - start)
    source.read_into("blob", start, memoryview(buffer), version=version)
    return bytes(buffer)


def starts(server: StoreServer) -> list[int | None]:
    return [entry.start for entry in server.log()]


# Connections


def test_one_connection_serves_many_requests(server: StoreServer, opened: Callable[..., HttpSource]) -> None:
    source = opened(f"{server.url}/models/m")
    for start in range(0, 500_000, 100_000):
        assert read(source, start, start + 100_000) == DATA[start : start + 100_000]
    assert server.num_connections == 1
    statistics = source.statistics()
    assert (statistics.requests, statistics.retries, statistics.received_bytes) == (5, 0, 500_000)


def test_a_kept_connection_that_the_server_closed_costs_no_attempt(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    source = opened(f"{server.url}/models/m", max_attempts=1)
    for _ in range(3):
        assert read(source) == DATA
        server.drop_connections()
    assert source.statistics().retries == 0


def test_no_listener_is_an_error_with_an_address(opened: Callable[..., HttpSource]) -> None:
    with ScriptedServer() as gone:
        url = gone.url
    with pytest.raises(
        UnavailableError, match=r"no connection to http://127\.0\.0\.1.* \(after 2 attempts\)"
    ):
        read(opened(url, max_attempts=2, outage_s=0))


def test_a_host_that_does_not_exist_is_named(opened: Callable[..., HttpSource]) -> None:
    host = "a" * 64 + ".test"  # a label too long for a name server to be asked
    with pytest.raises(UnavailableError, match=f"host name {host} cannot be resolved"):
        read(opened(f"http://{host}/m", max_attempts=1))


# What a server may do wrong


def test_a_body_that_breaks_off_is_resumed_at_the_byte_reached(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(on_requests({0: Fault(cut_after_bytes=100_000), 1: Fault(cut_after_bytes=7)}))
    source = opened(f"{server.url}/models/m")
    assert read(source, 1000) == DATA[1000:]
    assert starts(server) == [1000, 101_000, 101_007]
    assert source.statistics().retries == 2


def test_a_silent_server_is_left_and_the_rest_is_asked_of_another_connection(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(on_requests({0: Fault(stall_after_bytes=300_000)}))
    source = opened(f"{server.url}/models/m", read_timeout_s=0.3 * slowdown())
    assert read(source) == DATA
    assert starts(server)[-1] == 300_000
    assert server.num_connections == 2


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again(
    server: StoreServer, opened: Callable[..., HttpSource], status: int
) -> None:
    server.set_fault(on_requests({0: Fault(status=status, headers={"Retry-After": "0"})}))
    source = opened(f"{server.url}/models/m")
    assert read(source) == DATA
    assert source.statistics().retries == 1


def test_a_lasting_failure_is_given_up_with_its_status(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(lambda _: Fault(status=503))
    with pytest.raises(UnavailableError, match=r"blob in .*: the store answers 503 \(after 2 attempts\)"):
        read(opened(f"{server.url}/models/m", max_attempts=2, outage_s=0))
    assert len(server.log()) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDeniedError), (403, AccessDeniedError), (404, NotFoundError), (400, SourceError)],
)
def test_a_refusal_is_not_tried_again(
    server: StoreServer, opened: Callable[..., HttpSource], status: int, kind: type[SourceError]
) -> None:
    server.set_fault(lambda _: Fault(status=status))
    with pytest.raises(kind, match="blob"):
        read(opened(f"{server.url}/models/m"))
    assert len(server.log()) == 1


def test_a_request_that_is_dropped_is_made_again(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(on_requests({0: Fault(drop=True)}))
    assert read(opened(f"{server.url}/models/m")) == DATA


def test_another_range_than_asked_for_is_refused(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(on_requests({0: Fault(shift_range_bytes=4096)}))
    source = opened(f"{server.url}/models/m")
    assert read(source, 0, 1000) == DATA[:1000]
    assert source.statistics().retries == 1
    server.set_fault(lambda _: Fault(shift_range_bytes=4096))
    with pytest.raises(UnavailableError, match=r"other bytes of blob than 0 to 1,000"):
        read(opened(f"{server.url}/models/m", max_attempts=1), 0, 1000)


def test_the_whole_object_in_place_of_a_range_is_refused(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(lambda _: Fault(ignore_range=True))
    with pytest.raises(UnavailableError, match="the whole of blob where a range was asked for") as caught:
        read(opened(f"{server.url}/models/m", max_attempts=1), 0, 1000)
    assert "byte ranges" in caught.value.hint


def test_the_whole_object_is_taken_where_it_was_wanted(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    server.set_fault(
        lambda request: Fault(ignore_range=True, cut_after_bytes=9 if request.serial == 0 else None)
    )
    assert read(opened(f"{server.url}/models/m")) == DATA


def test_a_resumed_range_is_never_patched_from_two_objects(
    server: StoreServer, opened: Callable[..., HttpSource], tmp_path: Path
) -> None:
    def replace_after_cut(request: ServerRequest) -> Fault | None:
        if request.serial == 0:
            return Fault(cut_after_bytes=1000)
        other = tmp_path / "other"
        other.write_bytes(DATA[::-1])
        other.replace(tmp_path / "models" / "m" / "blob")
        return None

    server.set_fault(replace_after_cut)
    with pytest.raises(ChangedError, match="blob"):
        read(opened(f"{server.url}/models/m"))


def test_the_expected_version_is_asked_for(server: StoreServer, opened: Callable[..., HttpSource]) -> None:
    seen: list[str | None] = []
    server.set_fault(lambda request: seen.append(request.headers.get("if-match")))
    source = opened(f"{server.url}/models/m")
    version = source.stat("blob").version
    assert read(source, version=version) == DATA
    assert seen == [None, version]
    with pytest.raises(ChangedError):
        read(source, version='"another"')


def test_a_version_without_an_etag_is_compared_here(opened: Callable[..., HttpSource]) -> None:
    answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/9\r\n%b\r\nabcd"
    monday, tuesday = (answer % f"Last-Modified: {day}\r\n".encode() for day in ("Mon", "Tue"))
    with ScriptedServer(monday, monday, tuesday) as server:
        source = opened(server.url, max_attempts=1)
        version = "9/Mon"
        assert source.stat("blob").version == version
        assert read(source, 0, 4, version) == b"abcd"
        with pytest.raises(ChangedError, match="9/Tue is there"):
            read(source, 0, 4, version)
        assert all(b"If-Match" not in request for request in server.requests)


def test_a_compressed_answer_is_refused(opened: Callable[..., HttpSource]) -> None:
    with (
        ScriptedServer(
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\nabcd"
        ) as server,
        pytest.raises(FormatError, match="sends blob compressed"),
    ):
        opened(server.url).read("blob", max_bytes=100)


# Bodies without a length


def test_a_body_in_chunks_is_read_whole(opened: Callable[..., HttpSource]) -> None:
    chunks = b"4\r\nabcd\r\n00A;x=y\r\n" + b"0123456789" + b"\r\n0\r\nTrailer: x\r\n\r\n"
    with ScriptedServer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as server:
        assert opened(server.url).read("blob", max_bytes=14)[0] == b"abcd0123456789"


@pytest.mark.parametrize(
    "chunks",
    [
        b"4\r\nabcd",
        b"-4\r\nabcd\r\n0\r\n\r\n",
        b"4\r\nabcde\r\n0\r\n\r\n",
        b"0x4\r\nabcd\r\n0\r\n\r\n",
        b"\r\n" * 9,
    ],
)
def test_malformed_chunks_are_refused(opened: Callable[..., HttpSource], chunks: bytes) -> None:
    with (
        ScriptedServer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as server,
        pytest.raises(UnavailableError, match=r"malformed body|too early"),
    ):
        opened(server.url, max_attempts=1).read("blob", max_bytes=100)


def test_endless_chunks_stop_at_the_bound(opened: Callable[..., HttpSource]) -> None:
    chunks = b"a\r\n0123456789\r\n" * 1000
    with (
        ScriptedServer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as server,
        pytest.raises(FormatError, match="larger than the 100 bytes"),
    ):
        opened(server.url).read("blob", max_bytes=100)


def test_a_body_without_a_marked_end_is_refused(opened: Callable[..., HttpSource]) -> None:
    with (
        ScriptedServer(b"HTTP/1.1 200 OK\r\n\r\nperhaps all of it") as server,
        pytest.raises(UnavailableError, match="does not say how long"),
    ):
        opened(server.url, max_attempts=1).read("blob", max_bytes=100)


def test_a_short_body_is_not_taken_for_the_whole(opened: Callable[..., HttpSource]) -> None:
    with (
        ScriptedServer(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort") as server,
        pytest.raises(UnavailableError, match="closed the connection too early"),
    ):
        opened(server.url, max_attempts=1).read("blob", max_bytes=100)


# Heads


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4_0\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded: c\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(
    opened: Callable[..., HttpSource], answer: bytes
) -> None:
    with ScriptedServer(answer) as server, pytest.raises(UnavailableError, match="malformed answer"):
        opened(server.url, max_attempts=1).read("blob", max_bytes=100)


def test_early_hints_are_skipped(opened: Callable[..., HttpSource]) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    with ScriptedServer(hints + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd") as server:
        assert opened(server.url).read("blob", max_bytes=4)[0] == b"abcd"


# Redirects


def test_a_redirect_elsewhere_is_followed_without_the_secrets(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    seen: list[dict[str, str]] = []
    server.set_fault(lambda request: seen.append(dict(request.headers)))
    location = f"Location: {server.url}/models/m/blob?sig=1"
    moved = f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n{location}\r\n\r\n".encode()
    with ScriptedServer(moved) as first:
        source = opened(first.url, headers=(("Authorization", "Bearer hunter2"),))
        assert read(source, 5, 50) == DATA[5:50]
        assert b"Authorization: Bearer hunter2" in first.requests[0]
    assert [(headers["range"], "authorization" in headers) for headers in seen] == [("bytes=5-49", False)]


def test_redirects_in_a_circle_end(server: StoreServer, opened: Callable[..., HttpSource]) -> None:
    server.set_fault(lambda _: Fault(status=307, headers={"Location": "/models/m/blob"}))
    with pytest.raises(UnavailableError, match="redirects blob more than 3 times"):
        read(opened(f"{server.url}/models/m", max_attempts=1))
    assert len(server.log()) == 4


# Giving up


def assert_closing_ends_a_read(server: StoreServer, source: HttpSource, fault: Fault) -> None:
    """`server` treats the read as `fault` says, so that it waits for long."""
    answered, errors = threading.Event(), []

    def hook(_: ServerRequest) -> Fault:
        answered.set()
        return fault

    server.set_fault(hook)

    def wait_for_bytes() -> None:
        try:
            read(source)
        except SourceError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_bytes)
    thread.start()
    assert answered.wait(patience_s(10))
    source.close()
    thread.join(patience_s(10))
    assert [type(error) for error in errors] == [SourceClosedError]


@pytest.mark.parametrize(
    "fault", [Fault(stall_after_bytes=1000), Fault(status=503, headers={"Retry-After": "15"})]
)
def test_closing_ends_a_read_that_waits(
    server: StoreServer, opened: Callable[..., HttpSource], fault: Fault
) -> None:
    assert_closing_ends_a_read(server, opened(f"{server.url}/models/m"), fault)


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path / "server.pem")


@pytest.fixture
def tls_server(tmp_path: Path, certificate: Path) -> Iterator[StoreServer]:
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "blob").write_bytes(DATA)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with StoreServer(tmp_path, tls=tls) as started:
        yield started


def test_tls_reads_and_resumes(
    tls_server: StoreServer,
    opened: Callable[..., HttpSource],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    faults = {1: Fault(cut_after_bytes=50_000), 2: Fault(stall_after_bytes=200_000)}
    tls_server.set_fault(on_requests(faults))
    source = opened(f"{tls_server.url}/models/m", read_timeout_s=0.3 * slowdown())
    for _ in range(2):
        assert read(source) == DATA
    assert starts(tls_server) == [0, 0, 50_000, 250_000]


def test_closing_ends_a_read_over_tls(
    tls_server: StoreServer,
    opened: Callable[..., HttpSource],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    source = opened(f"{tls_server.url}/models/m")
    assert_closing_ends_a_read(tls_server, source, Fault(stall_after_bytes=100_000))


def test_an_untrusted_certificate_is_refused_at_once(
    tls_server: StoreServer, opened: Callable[..., HttpSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(SourceError, match="no valid certificate") as caught:
        read(opened(f"{tls_server.url}/models/m", hedge_after_s=0.0))  # a slow handshake gets no second one
    assert "SSL_CERT_FILE" in caught.value.hint
    assert tls_server.num_connections == 1


def test_what_follows_the_question_mark_is_sent_and_never_shown(
    server: StoreServer, opened: Callable[..., HttpSource]
) -> None:
    seen: list[dict[str, str]] = []
    server.set_fault(lambda request: seen.append(dict(request.query)))
    source = opened(f"{server.url}/models/m?sig=hunter2&x=a%20b")
    assert source.url == f"{server.url}/models/m"
    assert read(source, 0, 9) == DATA[:9]
    with pytest.raises(NotFoundError) as caught:
        source.stat("none")
    assert seen[0] == {"sig": "hunter2", "x": "a b"}
    assert "hunter2" not in str(caught.value)


def test_a_plain_source_imports_next_to_nothing() -> None:
    heavy = (
        "ssl",
        "http.client",
        "urllib.request",
        "email",
        "boto3",
        "botocore",
        "numpy",
        "asyncio",
        "random",
    )
    code = (
        "import sys; from teneral.loader.sources.open import open_source; open_source('http://h/m')\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
