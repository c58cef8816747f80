"""A standby process becomes the server that was asked for, and nothing is lost where there is none."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import save_tiny

from teneral.handlers.standby.handover import MAX_MESSAGE_BYTES, Channel, HandoverError, Order
from teneral.handlers.standby.pool import listen_locally
from teneral.loader.errors import UsageError
from teneral.runtime.errors import PortInUseError

WAIT_S = 90.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("standby") / "tiny"
    save_tiny("llama", path)
    return path


class Pool:
    """`teneral standby` with two processes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "standby.sock"
        command = [sys.executable, "-m", "teneral", "standby", str(self.path), "--processes", "2"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()

    def waiting(self) -> list[int]:
        """The pool's processes that have no order: its children in its own session."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if os.getsid(int(child)) == os.getsid(self.process.pid)]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.stop()


class Server:
    """`teneral serve` that is to be taken over."""

    def __init__(
        self, model: Path | str, socket_path: Path, *flags: str, environment: dict[str, str] | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "teneral",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--standby-socket", str(socket_path), "--name", "tiny", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )

    def get(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        until_s = time.monotonic() + WAIT_S
        while True:
            try:
                connection.connect()
                break
            except ConnectionRefusedError:
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < until_s
                time.sleep(0.01)
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def complete(self) -> str:
        status, answer = self.get(
            "/v1/completions", {"model": "tiny", "prompt": "a b c", "max_tokens": 4, "temperature": 0}
        )
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def marks(self) -> set[str]:
        return {span["name"] for span in self.get("/timeline")[1]["spans"] if span["lane"] == "process"}

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


def test_a_standby_serves_what_was_asked_for_and_another_takes_its_place(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    assert "2 standby processes" in pool.said
    before = pool.waiting()
    taken, alone = Server(model, pool.path), Server(model, tmp_path / "nobody.sock")
    assert taken.complete() == alone.complete()
    assert "taken over by a standby" in taken.marks()
    assert "taken over by a standby" not in alone.marks()
    after = pool.waiting()
    assert len(after) == 2
    assert len(set(after) - set(before)) == 1
    assert taken.end()[0] == alone.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_client_drains_the_standby(pool: Pool, model: Path, number: int) -> None:
    server = Server(model, pool.path)
    server.complete()
    code, said = server.end(number)
    assert code == 0
    assert "on http://127.0.0.1" in said, "the standby writes where the client would have"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_a_client_that_is_killed_takes_its_server_with_it(pool: Pool, model: Path) -> None:
    server = Server(model, pool.path)
    server.complete()
    server.process.kill()
    server.process.communicate(timeout=WAIT_S)
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_an_error_of_the_model_is_said_where_it_was_asked_for(pool: Pool, tmp_path: Path) -> None:
    server = Server(tmp_path / "nowhere", pool.path)
    _, said = server.process.communicate(timeout=WAIT_S)
    assert server.process.returncode == 3
    assert "nowhere" in said


def test_the_standby_has_the_clients_environment_and_folder(pool: Pool, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\ndef handler(event, context):\n    return [os.environ['COLOUR'], os.getcwd()]\n"
    )
    server = Server(
        model, pool.path, "--handler", f"{tmp_path}/mine.py:handler", environment={"COLOUR": "green"}
    )
    status, answer = server.get("/invoke", {})
    assert (status, answer) == (200, ["green", os.getcwd()])
    assert server.end()[0] == 0


def test_a_killed_standby_is_an_error_that_says_so(pool: Pool, model: Path) -> None:
    server = Server(model, pool.path)
    server.complete()
    listener = next(
        number
        for number in map(int, filter(str.isdigit, os.listdir("/proc")))
        if number not in (os.getpid(), server.process.pid) and _listens(number, server.port)
    )
    os.kill(listener, signal.SIGKILL)
    _, said = server.process.communicate(timeout=WAIT_S)
    assert server.process.returncode == 1
    assert "ended without a word" in said


def _listens(process_id: int, port: int) -> bool:
    """Whether the process holds the socket that listens at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    nodes = {
        f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    try:
        files = list(Path(f"/proc/{process_id}/fd").iterdir())
        return any(os.readlink(file) in nodes for file in files)
    except OSError:
        return False


def test_idle_standbys_end_with_their_pool(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    waiting = pool.waiting()
    assert len(waiting) == 2
    pool.process.kill()
    pool.stop()
    until_s = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{number}").exists() for number in waiting):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_killed_standby_is_replaced(pool: Pool) -> None:
    victim = pool.waiting()[0]
    os.kill(victim, signal.SIGKILL)
    until_s = time.monotonic() + WAIT_S
    while victim in (now := pool.waiting()) or len(now) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    "sent", [b"", b"nonsense\n", b"{}\n", b"[]\n", b'{"config": 1}\n', b"x" * (MAX_MESSAGE_BYTES + 70_000)]
)
def test_what_is_no_order_changes_nothing(pool: Pool, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.connect(str(pool.path))
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(100)
    assert len(pool.waiting()) == 2


def test_the_socket_is_only_for_its_user(pool: Pool) -> None:
    assert pool.path.stat().st_mode & 0o077 == 0


def test_a_second_pool_is_refused_and_a_dead_ones_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "one.sock")
    with listen_locally(path), pytest.raises(PortInUseError, match="another standby pool"):
        listen_locally(path)
    assert os.path.exists(path)  # closed, as when its pool was killed
    listen_locally(path).close()
    with pytest.raises(UsageError, match="cannot listen"):
        listen_locally(str(tmp_path / "no" / "folder"))


def test_files_that_came_with_a_bad_order_are_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(theirs)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ours, [b"{}\n"], [0, 1, 2])
    with pytest.raises(HandoverError, match="no order"):
        channel.receive_order()
    assert len(os.listdir("/proc/self/fd")) == before
    channel.close()
    ours.close()


def test_an_orders_secrets_are_not_shown() -> None:
    assert "environment" in Order.__dataclass_fields__
    assert not Order.__dataclass_fields__["environment"].repr
