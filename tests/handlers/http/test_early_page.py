"""The console's page before the web server: the same answers, and not a byte of any connection lost in between.

A conversation is what one client sends. Its answers must be the same whether all of it meets the web server, or its
beginning the early page.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.gated_server import GatedServer
from tests.support.http_server import Server, running_server
from tests.support.inspection import thread_of
from tests.support.instances import StagedInstance, TinyParts
from tests.support.load import patience_s

from teneral.handlers.console import early, files
from teneral.handlers.console.early import MAX_ANSWERS, MAX_CONNECTIONS, MAX_HEAD_BYTES, EarlyPage
from teneral.handlers.console.files import PATHS
from teneral.handlers.http.listening import listen

HEADERS = b"Host: localhost\r\nUser-Agent: Mozilla/5.0\r\nAccept: */*\r\nConnection: keep-alive\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WAIT_S = patience_s(30)
SOCKETS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def all_sockets_are_closed() -> Iterator[None]:
    yield
    while SOCKETS:
        SOCKETS.pop().close()


def get(path: str = "/", more: bytes = b"", *, line: bytes = b"GET %s HTTP/1.1") -> bytes:
    return line.replace(b"%s", path.encode()) + b"\r\n" + HEADERS + more + b"\r\n"


def post(body: bytes) -> bytes:
    length = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n".encode()
    return b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + length + b"\r\n" + body


# Not a word of them may be answered by the early page.
OTHERS = {
    "another path": get("/version"),
    "a query": get("/?again"),
    "a probe": get("/livez"),
    "no such file": get("/console.txt"),
    "a body": get("/", b"Content-Length: 3\r\n") + b"abc",
    "a body in chunks": get("/", b"Transfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\n\r\n",
    "HEAD": get(line=b"HEAD %s HTTP/1.1"),
    "HTTP/1.0": get(line=b"GET %s HTTP/1.0"),
    "an absolute address": get("http://localhost/"),
    "work": post(b'{"prompt": 5.5}'),
    "an origin": get("/", b"Origin: https://elsewhere.example\r\n"),
    "an id": get("/", b"x-request-id: mine\r\n"),
    "a trace": get("/", b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"),
    "the end": get("/", b"connection: close\r\n"),
    "another protocol": get("/", b"Upgrade: websocket\r\n"),
    "an expectation": get("/", b"Expect: 100-continue\r\n"),
    "a long head": get("/", b"Cookie: " + b"x" * MAX_HEAD_BYTES + b"\r\n"),
    "many headers": get("/", b"".join(b"X-%d: y\r\n" % number for number in range(101))),
    "a broken header": get("/", b"no colon\r\n"),
    "a space before the colon": get("/", b"Content-Length : 3\r\n"),
    "a folded header": get("/", b"X-A: b\r\n c\r\n"),
    "a bare line feed": get().replace(b"\r\n", b"\n"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a page's name": b"GET / HTTP/1.1\r\nHost: evil.example:8080\r\n\r\n",
    "a page's name with an address in it": b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n",
    "a private name": b"GET / HTTP/1.1\r\nHost: gpu-box.local\r\n\r\n",
    "an odd host": b"GET / HTTP/1.1\r\nhOST: a b/:\r\nAccept:\r\n\r\n",
    "two hosts": get("/", b"host: elsewhere\r\n"),
    "two connections": get("/", b"Connection: close\r\n"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "nothing": b"",
}
PAGES = {
    **{f"the file {path}": get(path) for path in sorted(PATHS)},
    "a tag of another version": get("/", b'If-None-Match: "abc"\r\n'),
    "an odd way to write it": b"GET / HTTP/1.1\r\nhOST: LOCALHOST:80\r\nAccept:\r\n\r\n",
    "an address": b"GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
    "two at a time": get("/") + get("/console.svg"),
}


def normal(answers: bytes) -> bytes:
    """Without what differs between any two answers."""
    head = rb"(?m)^(Date|x-request-id|openai-processing-ms): .*\r$"
    lines = re.sub(head, rb"\1: -\r", answers)
    # Headers have no order.
    return re.sub(
        rb"(HTTP/1\.1 [^\r]*\r\n)((?:[^\r]+\r\n)+)\r\n",
        lambda found: found[1] + b"\r\n".join(sorted(found[2].split(b"\r\n"))) + b"\r\n\r\n",
        lines,
    )


class Client:
    """One connection, whose reads and writes block."""

    def __init__(
        self, address: tuple[str, int], data: bytes = b"", *, receive_bytes: int | None = None
    ) -> None:
        self.socket = socket.socket()
        SOCKETS.append(self.socket)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(address)
        self.send(data)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def one(self) -> http.client.HTTPResponse:
        """The next answer, with its body read."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        response.body = response.read()  # type: ignore[attr-defined]
        return response

    def rest(self) -> bytes:
        """Everything until the server closes the connection, or resets it."""
        data = b""
        try:
            while piece := self.socket.recv(1 << 16):
                data += piece
        except ConnectionResetError:
            pass
        self.socket.close()
        return data

    def is_silent(self) -> bool:
        """True if nothing has come so far."""
        return not select.select([self.socket], [], [], 0)[0]


class Rig:
    """A listening socket, the early page in front of it, and then the web server behind it."""

    def __init__(self, parts: TinyParts, **settings: Any) -> None:
        self.parts = parts
        self.settings = settings
        self.listener = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.page = EarlyPage(self.listener, needs_key="api_key" in settings)

    def talk(self, data: bytes = b"", **options: Any) -> Client:
        return Client(self.address, data, **options)

    def settle(self) -> None:
        """Return once the early page has looked at everything that was sent before: it works in order."""
        client = self.talk(get("/console.svg"))
        assert client.one().status == 200
        client.socket.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        instance = StagedInstance(self.parts, **self.settings)
        instance.let_in()
        async with running_server(instance, listener=self.listener, accepted=self.page.hand_over) as server:
            yield server

    async def late(self, conversation: bytes) -> bytes:
        """The web server's own answers, as `normal` has them."""
        return normal(await asyncio.to_thread(self.talk(conversation).rest))

    def close(self) -> None:
        self.page.__exit__()
        self.listener.close()


@pytest.fixture
def rig(tiny_parts: TinyParts) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(tiny_parts, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("settings", [{}, {"api_key": "sesame"}], ids=["open", "with a key"])
async def test_each_file_is_answered_as_the_web_server_answers_it(
    rig: Callable[..., Rig], settings: dict[str, str]
) -> None:
    here = rig(**settings)
    clients = {name: here.talk(asked) for name, asked in PAGES.items()}
    tags = {}
    for path in PATHS:
        client = here.talk(get(path))
        tags[path] = client.one().headers["ETag"].encode()
        client.socket.close()
    for path, tag in tags.items():
        clients[f"the known file {path}"] = here.talk(get(path, b"if-none-match: " + tag + b"\r\n"))
    asked = {
        **PAGES,
        **{
            f"the known file {path}": get(path, b"if-none-match: " + tag + b"\r\n")
            for path, tag in tags.items()
        },
    }
    for client in clients.values():
        assert client.socket.recv(12, socket.MSG_PEEK).startswith(
            b"HTTP/1.1 "
        )  # before there is a web server
    async with here.serving():
        for name, client in clients.items():
            client.send(LAST)
            found = normal(await asyncio.to_thread(client.rest))
            assert found == await here.late(asked[name] + LAST), name
            assert found.startswith(b"HTTP/1.1 304" if "known" in name else b"HTTP/1.1 200"), name
            assert (b'data-key="needed"' in found) is ("api_key" in settings and b"<!doctype" in found)


@pytest.mark.parametrize("name", OTHERS)
async def test_every_other_request_waits_for_the_web_server(rig: Callable[..., Rig], name: str) -> None:
    here = rig()
    clients = [here.talk(OTHERS[name]), here.talk(get() + OTHERS[name])]
    assert clients[1].one().status == 200
    here.settle()
    for client in clients:
        assert client.is_silent()
        client.send(LAST)
    async with here.serving():
        expected = await here.late(OTHERS[name] + LAST)
        for client in clients:
            assert normal(await asyncio.to_thread(client.rest)) == expected


async def test_what_comes_in_pieces_is_put_together_by_the_web_server(rig: Callable[..., Rig]) -> None:
    here = rig()
    conversation = get() + LAST
    ends = range(1, len(get()), len(get()) // 9)
    clients = [(here.talk(conversation[:end]), end) for end in ends]
    here.settle()
    assert all(client.is_silent() for client, _ in clients)
    async with here.serving():
        expected = await here.late(conversation)
        for client, end in clients:
            client.send(conversation[end:])
            assert normal(await asyncio.to_thread(client.rest)) == expected


async def test_the_rest_of_an_answer_that_is_not_read_comes_later(rig: Callable[..., Rig]) -> None:
    here = rig()
    conversation = get("/console.js") * 12 + LAST
    client = here.talk(conversation, receive_bytes=4096)
    here.settle()
    async with here.serving() as server:
        assert normal(await asyncio.to_thread(client.rest)) == await here.late(conversation)
        assert server.metrics_text().count('route="/console.js",status="200"} 24.0') == 1


async def test_connections_and_answers_are_bounded(rig: Callable[..., Rig]) -> None:
    here = rig()
    many = [here.talk() for _ in range(MAX_CONNECTIONS)]
    late = here.talk(get())
    many[0].send(get())
    assert many[0].one().status == 200
    assert late.is_silent(), "its connection is not accepted yet"
    greedy = get("/console.svg") * (MAX_ANSWERS + 10) + LAST
    many[1].send(greedy)
    thread = thread_of(here.page)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    async with here.serving():
        late.send(LAST)
        assert normal(await asyncio.to_thread(late.rest)) == await here.late(get() + LAST)
        assert normal(await asyncio.to_thread(many[1].rest)) == await here.late(greedy)
        many[2].send(LAST)
        assert b"200 OK" in await asyncio.to_thread(many[2].rest)


async def test_clients_that_go_away_touch_no_other(rig: Callable[..., Rig]) -> None:
    here = rig()
    for data in (b"", get(), OTHERS["work"], get("/console.js") * 30):
        client = here.talk(data)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()  # by a reset
        half = here.talk(data)
        half.socket.shutdown(socket.SHUT_WR)
        half.socket.close()
    other = here.talk(get())
    assert other.one().status == 200
    async with here.serving():
        other.send(LAST)
        assert b"200 OK" in await asyncio.to_thread(other.rest)


@pytest.mark.parametrize("seed", range(8))
async def test_no_byte_is_lost_at_any_moment_of_the_hand_over(rig: Callable[..., Rig], seed: int) -> None:
    """Clients send random requests in random pieces, while the web server takes over."""
    chance = random.Random(seed)
    here = rig()
    kinds = [*map(get, PATHS), get("/version"), get("/?again"), post(b'{"prompt": 5.5}')]
    conversations = [
        b"".join(chance.choices(kinds, k=chance.randint(1, 6))) + LAST for _ in range(MAX_CONNECTIONS - 2)
    ]
    pieces = [_cut(conversation, chance) for conversation in conversations]
    answers: dict[int, bytes] = {}

    def client(number: int) -> None:
        one = here.talk()
        sender = threading.Thread(target=_send_slowly, args=(one, pieces[number]))
        sender.start()
        answers[number] = normal(one.rest())
        sender.join()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(conversations))]
    for thread in threads:
        thread.start()
    time.sleep(chance.uniform(0, 0.06))
    async with here.serving():
        for thread in threads:
            await asyncio.to_thread(thread.join)
        for number, conversation in enumerate(conversations):
            assert answers[number] == await here.late(conversation)


def _cut(data: bytes, chance: random.Random) -> list[bytes]:
    places = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(chance.randint(0, 5)))})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def _send_slowly(client: Client, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        client.send(piece)
        time.sleep(0.01)


def test_a_start_that_fails_closes_the_connections(rig: Callable[..., Rig]) -> None:
    here = rig()
    clients = [here.talk(), here.talk(OTHERS["work"]), here.talk(get())]
    assert clients[2].one().status == 200
    here.close()
    assert [client.rest() for client in clients] == [b"", b"", b""]


def test_files_are_read_and_modules_imported_for_a_request_alone() -> None:
    program = """
import json, re, select, socket, sys, threading, functools
from teneral.handlers.http.listening import listen
before = set(sys.modules)
from teneral.handlers.console.early import EarlyPage
with EarlyPage(listen("127.0.0.1", 0)):
    print(json.dumps(sorted(set(sys.modules) - before)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == ["teneral.handlers.console", "teneral.handlers.console.early"]


async def test_a_file_that_cannot_be_read_is_left_to_the_web_server(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = files.asset

    def without_script(name: str) -> bytes:
        if name == "console.js":
            raise FileNotFoundError(name)
        return asset(name)

    monkeypatch.setattr(files, "asset", without_script)
    here = rig()
    client = here.talk(get("/console.js") + LAST)
    here.settle()
    assert client.is_silent()
    monkeypatch.undo()
    async with here.serving():
        assert await asyncio.to_thread(client.rest) != b""


def test_the_pattern_knows_every_file() -> None:
    assert all(re.match(early.HEAD, get(path)) for path in PATHS)


# As a process


def test_a_server_shows_its_page_before_it_serves(tmp_path: Path) -> None:
    with GatedServer(tmp_path) as server:
        asked = Client(server.address, get("/timeline"))
        page = Client(server.address, get())
        assert page.one().status == 200
        server.let_start()
        assert json.loads(asked.one().body)["spans"]  # type: ignore[attr-defined]
        page.send(get("/console.js"))
        assert page.one().status == 200


def test_without_a_console_nothing_is_answered_early(tmp_path: Path) -> None:
    with GatedServer(tmp_path, "--no-console") as server:
        client = Client(server.address, get())
        time.sleep(0.5)
        assert client.is_silent()
        server.let_start()
        assert client.one().status == 405
