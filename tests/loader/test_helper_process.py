"""A helper serves its owner over a socket, however it was started, and its end is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.standby_processes import runs

from teneral.loader.process.helper import HelperProcess

# A module of the package's own that a helper can run in a test: it says what it is, and echoes until the socket ends.
ECHO = """
import os, socket, sys

def main(socket_fd, *fds):
    with socket.socket(fileno=socket_fd) as sock:
        content = os.pread(fds[0], 100, 0) if fds else b""
        sock.sendall(b"%d %d %s\\n" % (os.getpid(), os.getppid(), content))
        while data := sock.recv(100):
            if data == b"raise":
                raise ValueError("on purpose")
            sock.sendall(data)

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
"""
WAIT_S = patience_s(30)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's name with the helper's code and the echo module in it, and nothing else."""
    import teneral.loader.process.helper as module

    folder = tmp_path / "pack" / "loader" / "process"
    folder.mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    (folder / "helper.py").write_text(Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (folder.parent / "echo.py").write_text(ECHO, encoding="utf-8")
    return tmp_path


HEAD = (
    "import json, os, signal, sys, threading, time\n"
    "from pack.loader.process.helper import HelperProcess\n"
    "def say(helper): return helper.socket.recv(200).decode().split(' ', 2)\n"
)


def start(package: Path, program: str) -> subprocess.Popen[str]:
    """Start the program; `run` also waits for its end."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=package,
        env=environment,
    )


def run(package: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of a fresh, single-threaded interpreter that has `HelperProcess` and `say(helper)`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", HEAD + program],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=package,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("stopped", ["nothing", "the helper", "the owner and the helper"])
@pytest.mark.parametrize("fork", [True, False])
def test_a_helper_ends_with_its_owner_also_when_it_is_stopped(
    package: Path, fork: bool, stopped: str
) -> None:
    """It is killed by the system: a stopped process sees no end of a socket."""
    program = (
        f"helper = HelperProcess('.loader.echo', fork={fork})\n"
        "say(helper)\n"
        f"if {stopped!r} != 'nothing': os.kill(helper.pid, signal.SIGSTOP)\n"
        "print(os.getpid(), helper.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = start(package, program)
    assert owner.stdout is not None
    with owner, owner.stdout:
        owner_pid, helper_pid = map(int, owner.stdout.readline().split())
        if "owner" in stopped:
            os.kill(owner_pid, signal.SIGSTOP)
        os.kill(owner_pid, signal.SIGKILL)
        ends_s = time.monotonic() + patience_s(1)
        while runs(helper_pid) and time.monotonic() < ends_s:
            time.sleep(0.01)
        try:
            assert not runs(helper_pid)
        finally:
            if runs(helper_pid):
                os.kill(helper_pid, signal.SIGKILL)


def test_helpers_that_a_thread_has_started_outlive_that_thread(package: Path) -> None:
    done = run(
        package,
        "helpers = []\n"
        "def begin(): helpers.append(HelperProcess('.loader.echo'))\n"
        "thread = threading.Thread(target=begin)\n"
        "thread.start()\n"
        "thread.join()\n"
        "say(helpers[0])\n"
        "time.sleep(0.2)\n"
        "helpers[0].socket.sendall(b'hello')\n"
        "print(helpers[0].socket.recv(10).decode())\n",
    )
    assert done.stdout == "hello\n", done.stderr


@pytest.mark.parametrize("fork", [True, False])
def test_a_helper_answers_until_its_socket_is_closed(package: Path, fork: bool) -> None:
    done = run(
        package,
        f"helper = HelperProcess('.loader.echo', fork={fork})\n"
        "first = say(helper)\n"
        "helper.socket.sendall(b'hello')\n"
        "answer = helper.socket.recv(10).decode()\n"
        "helper.socket.close()\n"
        "print(json.dumps([first[:2], os.getpid(), answer, helper.wait(), helper.wait()]))\n",
    )
    (pid, parent), own, answer, status, again = json.loads(done.stdout)
    assert int(pid) != own
    assert int(parent) == own
    assert (answer, status, again) == ("hello", 0, 0)


@pytest.mark.parametrize("fork", [True, False])
def test_a_helper_has_the_open_files_that_it_was_given(package: Path, fork: bool) -> None:
    (package / "secret").write_text("content")
    done = run(
        package,
        "fd = os.open('secret', os.O_RDONLY)\n"
        f"helper = HelperProcess('.loader.echo', fds=(fd,), fork={fork})\n"
        "os.close(fd)\n"
        "print(say(helper)[2])\n",
    )
    assert done.stdout.strip() == "content"


@pytest.mark.parametrize("fork", [True, False])
def test_a_helper_that_fails_says_why_and_has_a_status(package: Path, fork: bool) -> None:
    done = run(
        package,
        f"helper = HelperProcess('.loader.echo', fork={fork})\n"
        "say(helper)\n"
        "helper.socket.sendall(b'raise')\n"
        "print('status', helper.wait())\n",
    )
    assert done.stdout.strip() == "status 1"
    assert "ValueError: on purpose" in done.stderr
    assert done.stdout.count("status") == 1, "the fork ran on in its owner's code"


@pytest.mark.parametrize("fork", [True, False])
def test_a_killed_helpers_status_is_its_signal_and_killing_it_again_does_nothing(
    package: Path, fork: bool
) -> None:
    done = run(
        package,
        f"helper = HelperProcess('.loader.echo', fork={fork})\n"
        "say(helper)\n"
        "waiter = threading.Thread(target=helper.wait); waiter.start()\n"
        "helper.kill(); waiter.join(); helper.kill()\n"
        "print(helper.wait())\n",
    )
    assert int(done.stdout) == -signal.SIGKILL


def test_a_forked_helper_ends_with_its_owner(package: Path) -> None:
    """Its copy of the owner's end of the socket is closed, or it would never see the end."""
    done = run(
        package,
        "helper = HelperProcess('.loader.echo', fork=True)\nprint(say(helper)[0], flush=True)\nos._exit(0)\n",
    )
    pid = int(done.stdout)
    gone = threading.Event()
    for _ in range(int(100 * WAIT_S)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        gone.wait(0.01)
    else:
        pytest.fail("it goes on without its owner")


def test_nothing_is_forked_where_there_are_threads(package: Path) -> None:
    """A fork copies locks that no thread will ever release; a fresh interpreter has its own modules instead."""
    done = run(
        package,
        "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start()\n"
        "helper = HelperProcess('.loader.echo', fork=True)\n"
        "pid = int(say(helper)[0])\n"
        "print(open(f'/proc/{pid}/cmdline').read().split(chr(0)))\n"
        "helper.socket.close(); helper.wait(); stop.set()\n",
    )
    assert "pack.loader.echo" in done.stdout


def test_what_the_system_refuses_is_raised_and_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError("no more processes")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no more processes"):
        HelperProcess(".loader.load.child")
    assert len(os.listdir("/proc/self/fd")) == before
