"""When a reader of one connection is woken: by much while much is to come, by the first byte otherwise."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.store_certificate import write_certificate

from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.address import Origin
from teneral.loader.sources.http.poll_coroutines import PollCoroutine, Wait
from teneral.loader.sources.http.wire import MAX_SLICE_BYTES, WAKE_BYTES, AddressBook, Wire, WireTimeoutError

WAIT_MS = 10_000


def _nothing() -> None:
    pass


def finish(
    steps: PollCoroutine[int] | PollCoroutine[None], begun: Callable[[], object] = _nothing
) -> int | None:
    """Run them to their end, woken by nothing but what they wait for; `begun` is called when they wait."""
    try:
        while True:
            wait: Wait = next(steps)
            begun()
            begun = _nothing
            poll = select.poll()
            poll.register(wait.fd, wait.events)
            assert poll.poll(WAIT_MS), "nothing woke the waiting reader"
    except StopIteration as end:
        result: int | None = end.value
        return result


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    """A connected wire, and the server's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = Origin("http", "127.0.0.1", listener.getsockname()[1])
        wire = Wire(origin, SourceOptions(), None, AddressBook())
        finish(wire.connect())
        server, _ = listener.accept()
        with server:
            yield wire, server
        wire.close()


def begin_a_large_body(wire: Wire, server: socket.socket) -> None:
    """So much that the reader is woken by `WAKE_BYTES`; all that was sent has been read then."""
    server.settimeout(WAIT_MS / 1000)
    wire.send(b"GET")
    assert server.recv(10) == b"GET"
    server.sendall(b"x" * 1000)
    view = memoryview(bytearray(MAX_SLICE_BYTES + WAKE_BYTES))
    got = 0
    while got < 1000:
        got += wire.receive(view[: MAX_SLICE_BYTES + WAKE_BYTES])
    assert got == 1000


def test_who_begins_to_wait_as_steps_do_is_woken_by_the_first_byte(pair: tuple[Wire, socket.socket]) -> None:
    """A body whose connection fell behind goes on like that, parallel to the second one."""
    wire, server = pair
    begin_a_large_body(wire, server)
    view = memoryview(bytearray(100))
    assert finish(wire.receive_soon(view), lambda: server.sendall(b"y")) == 1
    assert view[0] == ord("y")


def test_an_answer_to_the_next_request_wakes_with_its_first_byte(pair: tuple[Wire, socket.socket]) -> None:
    wire, server = pair
    begin_a_large_body(wire, server)
    wire.send(b"GET")
    assert server.recv(10) == b"GET"
    assert finish(wire.receive_soon(memoryview(bytearray(100))), lambda: server.sendall(b"y")) == 1


def test_the_end_of_a_body_is_not_waited_for_in_large_pieces(pair: tuple[Wire, socket.socket]) -> None:
    wire, server = pair
    begin_a_large_body(wire, server)
    server.sendall(b"z" * 7)
    view, got = memoryview(bytearray(7)), 0
    while got < 7:
        got += wire.receive(view[got:])
    assert bytes(view) == b"z" * 7


@pytest.fixture(params=["plain", "tls"])
def uploading(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Wire, socket.socket]]:
    """A wire that gives up after two seconds, and the server's end of it, whose buffer is small."""
    client = served = None
    if request.param == "tls":
        certificate = write_certificate(tmp_path / "server.pem")
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(certificate)
        client = ssl.create_default_context(cafile=str(certificate))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        origin = Origin("https" if client else "http", "127.0.0.1", listener.getsockname()[1])
        wire = Wire(origin, SourceOptions(read_timeout_s=2.0), client, AddressBook())
        accepted: list[socket.socket] = []

        def accept() -> None:
            server, _ = listener.accept()
            accepted.append(served.wrap_socket(server, server_side=True) if served else server)

        thread = threading.Thread(target=accept)
        thread.start()
        finish(wire.connect())
        thread.join()
        with accepted[0] as server:
            yield wire, server
        wire.close()


def test_a_body_larger_than_all_buffers_arrives_whole(uploading: tuple[Wire, socket.socket]) -> None:
    """The server pauses for longer than the kernel's own limit, so that pieces are sent in part."""
    wire, server = uploading
    body = bytes(range(256)) * 65_536  # 16 MiB
    received = bytearray()

    def receive() -> None:
        time.sleep(1.3)
        while len(received) < len(body) and (piece := server.recv(1 << 20)):
            received.extend(piece)

    thread = threading.Thread(target=receive)
    thread.start()
    wire.send(body)
    thread.join()
    assert received == body


def test_a_server_that_takes_nothing_of_a_body_is_given_up(uploading: tuple[Wire, socket.socket]) -> None:
    wire, _ = uploading
    with pytest.raises(WireTimeoutError, match="took nothing for 2 s"):
        wire.send(bytes(32 << 20))
