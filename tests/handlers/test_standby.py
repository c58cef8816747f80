"""A standby process becomes the server that was asked for, and nothing is lost where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.standby_processes import (
    WAIT_S,
    Pool,
    Server,
    children,
    command_line,
    descendants,
    runs,
    until,
)
from tests.support.tiny_models import save_tiny

from teneral.handlers.standby.handover import MAX_MESSAGE_BYTES, Channel, HandOver
from teneral.handlers.standby.pool import Serving, StandbyPool, listen_locally
from teneral.loader.errors import UsageError
from teneral.loader.process.helper import ProcessContext
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import PortInUseError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("standby") / "tiny"
    save_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.stop()


def test_a_standby_serves_what_was_asked_for_and_another_takes_its_place(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    assert "2 standby processes" in pool.stderr_text
    before = pool.wait_full()
    taken, alone = Server(model, pool.path), Server(model, tmp_path / "absent.sock")
    assert taken.complete() == alone.complete()
    assert "taken over by a standby" in taken.marks()
    assert "taken over by a standby" not in alone.marks()
    after = pool.wait_full()
    assert len(set(after) - set(before)) == 1
    taken.end_well()
    alone.end_well()


def test_a_standby_whose_helper_was_killed_is_not_handed_out(pool: Pool, model: Path) -> None:
    before = pool.wait_full()
    for process in before:
        until(lambda process=process: len(children(process)) > 0, "it has its helpers")  # type: ignore[misc]
        for helper in children(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)
    with Server(model, pool.path) as server:
        assert server.complete()
        server.end_well()
    until(lambda: not any(map(runs, before)), "both are replaced")
    pool.wait_full()
    with Server(model, pool.path) as server:
        assert "taken over by a standby" in server.marks()


def test_a_taken_process_is_replaced_before_the_pool_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []

    def fork() -> int:
        forked.append(100 + len(forked))
        return forked[-1]

    def no_children(*_: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "waitpid", no_children)
    wake, woken = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, wake, woken:
        pool = StandbyPool(listener, 2, 0, Serving(lambda *_: None, lambda _: 1))
        pool.fill()
        assert forked == [100, 101]
        os.write(pool.ends.say_taken, b"100\n")
        pool.turn(wake)
        woken.send(b"x")  # the next wait ends at once, too
        pool.turn(wake)
        assert forked == [100, 101, 102]
        pool.close()


def test_a_standby_that_ends_before_the_pool_waits_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal came before there was a handler: nothing else wakes the pool."""
    forked: list[int] = []
    ended = [100]

    def fork() -> int:
        forked.append(100 + len(forked))
        return forked[-1]

    def turn(pool: StandbyPool, _: socket.socket) -> None:
        pool.fill()
        signal.raise_signal(signal.SIGTERM)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(os, "waitpid", lambda *_: (ended.pop() if ended else 0, 0))
    monkeypatch.setattr("teneral.handlers.standby.pool.MIN_LIFE_S", 0.0)
    monkeypatch.setattr(StandbyPool, "turn", turn)
    with socket.socket(socket.AF_UNIX) as listener:
        pool = StandbyPool(listener, 2, 0, Serving(lambda *_: None, lambda _: 1))
        try:
            pool.fill()
            pool.run()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            pool.close()
    assert forked == [100, 101, 102]


def test_a_process_that_took_an_order_as_the_pool_ends_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has not read of it yet. The others see the end of the pool's pipe."""
    kills: list[Any] = []

    def turn(pool: StandbyPool, _: socket.socket) -> None:
        os.write(pool.ends.say_taken, b"100\n")
        signal.raise_signal(signal.SIGTERM)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    monkeypatch.setattr(os, "fork", lambda: 100)
    monkeypatch.setattr(os, "kill", lambda *given: kills.append(given))
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    monkeypatch.setattr(StandbyPool, "turn", turn)
    with socket.socket(socket.AF_UNIX) as listener:
        pool = StandbyPool(listener, 1, 0, Serving(lambda *_: None, lambda _: 1))
        alive = os.dup(pool.ends.alive)
        try:
            pool.fill()
            pool.run()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            pool.close()
    assert not kills
    assert os.read(alive, 1) == b""
    os.close(alive)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_client_drains_the_standby(pool: Pool, model: Path, number: int) -> None:
    pool.wait_full()
    server = Server(model, pool.path)
    server.complete()
    code, output = server.end(number)
    assert code == 0
    assert "on http://127.0.0.1" in output, "the standby writes where the client would have"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_a_client_that_is_killed_takes_its_server_with_it(pool: Pool, model: Path) -> None:
    pool.wait_full()
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


def test_a_standby_renders_chats_with_a_process_that_it_had_ready(pool: Pool, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    save_tiny("llama", model)
    settings = {"chat_template": "{{ messages[0].content }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    waiting = pool.wait_full()
    until(lambda: all(len(_chat_workers(process)) == 1 for process in waiting), "each has one ready")
    ready = {worker for process in waiting for worker in _chat_workers(process)}
    server = Server(model, pool.path)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
    status, answer = server.get("/v1/chat/completions", body)
    assert status == 200, answer
    (served,) = set(waiting) - set(pool.waiting())
    (taken,) = _chat_workers(served)
    assert taken in ready
    server.end_well()
    until(lambda: not runs(taken), "it ends with the server")


def _chat_workers(process_id: int) -> list[int]:
    return [
        number
        for number in descendants(process_id)
        if any("chat_worker" in word for word in command_line(number))
    ]


def test_an_error_of_the_model_is_printed_by_the_client(pool: Pool, tmp_path: Path) -> None:
    pool.wait_full()
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text("{}")  # and no weights
    server = Server(tmp_path / "nowhere", pool.path)
    _, output = server.process.communicate(timeout=WAIT_S)
    assert server.process.returncode == 10
    assert "nowhere" in output


def test_the_standby_has_the_clients_environment_and_folder(pool: Pool, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\ndef handler(event, context):\n    return [os.environ['COLOUR'], os.getcwd()]\n"
    )
    pool.wait_full()
    server = Server(
        model, pool.path, "--handler", f"{tmp_path}/mine.py:handler", environment={"COLOUR": "green"}
    )
    status, answer = server.get("/invoke", {})
    assert (status, answer) == (200, ["green", os.getcwd()])
    server.end_well()


def test_memory_that_was_taken_ahead_holds_the_weights_and_the_rest_is_given_back(
    model: Path, tmp_path: Path
) -> None:
    reserve_bytes = 256 << 20
    packed = tmp_path / "packed"
    pack(FileStore(model), FileStore(packed))
    pool = Pool(tmp_path, "--memory", f"{reserve_bytes}")
    try:
        until_s = time.monotonic() + WAIT_S
        while min(map(_own_bytes, pool.wait_full())) < reserve_bytes:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        before = pool.wait_full()
        for each in (packed, model):  # plain weights are used where they lie
            taken, alone = Server(each, pool.path), Server(each, tmp_path / "absent.sock")
            assert taken.complete() == alone.complete()
            assert "taken over by a standby" in taken.marks()
            after = pool.wait_full()
            (server,) = set(before) - set(after)
            assert _own_bytes(server) < reserve_bytes
            taken.end_well()
            alone.end_well()
            before = after
    finally:
        pool.stop()


@pytest.mark.parametrize("size", ["lots", "-1", "9999TB"])
def test_an_invalid_size_is_refused(tmp_path: Path, size: str) -> None:
    command = [sys.executable, "-m", "teneral", "standby", str(tmp_path / "s"), f"--memory={size}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert "--memory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_more_memory_than_there_is_is_refused_with_the_numbers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "teneral", "standby", str(tmp_path / "s"), "--memory", "900000GiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode not in (0, 1)
    assert "MiB are available" in ended.stderr
    assert not (tmp_path / "s").exists()


def _own_bytes(process_id: int) -> int:
    """Resident memory that is in no file."""
    status = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"RssAnon:\s*(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def test_a_killed_standby_is_an_error_that_says_so(pool: Pool, model: Path) -> None:
    pool.wait_full()
    server = Server(model, pool.path)
    server.complete()
    listener = next(
        number
        for number in map(int, filter(str.isdigit, os.listdir("/proc")))
        if number not in (os.getpid(), server.process.pid) and _listens(number, server.port)
    )
    os.kill(listener, signal.SIGKILL)
    _, output = server.process.communicate(timeout=WAIT_S)
    assert server.process.returncode == 1
    assert "ended without an exit status" in output


def _listens(process_id: int, port: int) -> bool:
    """True if the process holds the socket that listens at this port."""
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_meets_the_pools_imports_is_not_swallowed_by_them(tmp_path: Path, number: int) -> None:
    (tmp_path / "tokenizers.py").write_text(
        "import sys, time\n"
        "print('importing', file=sys.stderr, flush=True)\n"
        "for _ in range(600):\n"
        "    try:\n        time.sleep(0.1)\n"
        "    except BaseException:\n        pass\n"  # as Python does where a signal meets a clean-up
    )
    socket_path = tmp_path / "standby.sock"
    command = [sys.executable, "-m", "teneral", "standby", str(socket_path)]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "importing\n"
        process.send_signal(number)
        try:
            assert process.wait(WAIT_S / 3) == 0
        finally:
            process.kill()
    assert not socket_path.exists()


def test_a_killed_standby_is_replaced(pool: Pool) -> None:
    victim = pool.wait_full()[0]
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
    assert len(pool.wait_full()) == 2


def test_a_client_that_gives_up_leaves_no_open_file_behind(pool: Pool) -> None:
    """It waits for a signal at most: were its standard error held, a reader would wait for ever."""
    pool.wait_full()
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as sock, socket.create_server(("127.0.0.1", 0)) as listener:
        sock.connect(str(pool.path))
        order = HandOver(
            ServeConfig(model="m"),
            ProcessContext({}, "/"),
            0.0,
            (writing, writing, writing),
            listener.fileno(),
        )
        channel = Channel(sock)
        channel.send_order(order)
        assert channel.receive()["process"] in pool.waiting()
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        os.set_blocking(reading, False)
        until_s = time.monotonic() + WAIT_S
        while stream.read(1) is None:  # b"" once no process holds the other end
            assert time.monotonic() < until_s
            time.sleep(0.02)


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


@pytest.mark.parametrize("kind", ["file", "empty file", "folder", "link to a file", "dead link", "fifo"])
def test_a_path_that_is_not_a_socket_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "notes.txt", tmp_path / "other"
    other.write_text("kept")
    match kind:
        case "folder":
            path.mkdir()
        case "link to a file":
            path.symlink_to(other)
        case "dead link":
            path.symlink_to(tmp_path / "absent")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.write_text("kept" if kind == "file" else "")
    before = path.lstat()
    with pytest.raises(UsageError, match=r"notes\.txt exists and is not a socket of this user"):
        listen_locally(str(path))
    assert path.lstat() == before
    assert other.read_text() == "kept"


def test_a_link_to_a_dead_socket_is_not_followed(tmp_path: Path) -> None:
    listen_locally(str(tmp_path / "dead.sock")).close()
    (tmp_path / "link").symlink_to(tmp_path / "dead.sock")
    with pytest.raises(UsageError, match="not a socket of this user"):
        listen_locally(str(tmp_path / "link"))
    assert (tmp_path / "dead.sock").is_socket()


def test_a_pool_removes_only_the_socket_that_it_has_made(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.path.unlink()
    pool.path.write_text("kept")
    pool.stop()
    assert pool.path.read_text() == "kept"
