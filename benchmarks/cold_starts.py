"""One cold start, from starting a process to its first token, or to the last of several.

Of Teneral, tokens come over HTTP, from a request that is sent as soon as the port is open: as the one that woke the
container would be. Of the peers they are printed by the process that made them (`peers/first_token.py`), which spares
them a server. What happened before the process was started (packing, a standby pool) is not part of it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from benchmarks import answers, predictions
from benchmarks.answers import Answer
from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import MemoryWatch, RunError, environment
from benchmarks.report import note

PROMPT = "The quick brown fox jumps over the lazy dog, and then " * 3
RUN_TIMEOUT_S = 180.0
POOL_TIMEOUT_S = 60.0
PORT_POLL_S = 0.002
LOAD_POLL_S = 0.1

Counter = Callable[[], int]  # bytes that the store has sent so far


@dataclass(frozen=True)
class ColdStart:
    """`peak_rss_bytes` is of the process that was started; `peak_pss_bytes` of all that belong to it, if watched.

    `sent_bytes` is what the store had sent when the first token came, if it was asked; `timeline` the server's once
    its load is over, if it was wanted.
    """

    answer: Answer
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    sent_bytes: int | None = None
    timeline: dict[str, Any] | None = None

    @property
    def first_token_s(self) -> float:
        return self.answer.token_times_s[0]


def serve(
    model: str,
    *flags: str,
    variables: Mapping[str, str],
    watch: bool = False,
    pool: StandbyPool | None = None,
    settle_s: float = 0.0,
    num_tokens: int = 1,
    counter: Counter | None = None,
    wants_timeline: bool = False,
    asked: str = "model",
    port: int | None = None,
) -> ColdStart:
    """`teneral serve MODEL`, and one request for the model, or the adapter of it, with the name `asked`; it ends
    `settle_s` after the answer, or after its timeline is complete. With `pool`, a process of it serves. Raises
    `RunError`.
    """
    port = port or _free_port()
    if pool:
        pool.settle()
    command = [sys.executable, "-m", "teneral", "serve", model, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--name", "model", "--log-level", "error"]
    command += ["--standby-socket", pool.path] if pool else []
    roots = [pool.process_id] if pool else []
    with _started(command, variables, roots, watch=watch, counter=counter) as run:
        connection = _connect(port, run.process)
        connection.request(
            "POST", "/v1/completions", json.dumps({**_request(num_tokens), "model": asked}), _JSON
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RunError(f"{model}: {response.status} {response.read(500)!r}")
        run.answer = answers.of_stream(response, run.elapsed_s, run.note_sent)
        response.read()
        if wants_timeline:
            run.timeline = _complete_timeline(connection)
        time.sleep(settle_s)
        run.process.terminate()
    return run.result()


def embed(model: str, *, variables: Mapping[str, str], watch: bool = False) -> ColdStart:
    """`teneral serve MODEL` of an encoder, and one embedding of `PROMPT`. Raises `RunError`."""
    port = _free_port()
    command = [sys.executable, "-m", "teneral", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--name", "model", "--log-level", "error"]
    with _started(command, variables, [], watch=watch, counter=None) as run:
        body = {"model": "model", "input": PROMPT}
        run.answer = _json_answer(_connect(port, run.process), "/v1/embeddings", body, run, key="data")
        run.process.terminate()
    return run.result()


def llama_server(program: Path, gguf: Path, *, watch: bool = False) -> ColdStart:
    """llama.cpp's own server on a GGUF file, and one token. It answers 503 while it loads. Raises `RunError`."""
    port = _free_port()
    command = [str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--ctx-size",
        "2048",
    ]
    variables = {"LD_LIBRARY_PATH": str(program.parent)}
    with _started(command, variables, [], watch=watch, counter=None) as run:
        body = {"prompt": PROMPT, "n_predict": 1, "temperature": 0}
        run.answer = _json_answer(_connect(port, run.process), "/completion", body, run, key="content")
        run.process.terminate()
    return run.result()


def _json_answer(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, object], run: _Run, *, key: str
) -> Answer:
    """The answer of a server that sends it in one piece, asked again while it says 503."""
    while True:
        connection.request("POST", path, json.dumps(body), _JSON)
        response = connection.getresponse()
        text = response.read()
        if response.status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            break
        time.sleep(PORT_POLL_S)
    if response.status != http.HTTPStatus.OK or key not in json.loads(text):
        raise RunError(f"{path}: {response.status} {text[:500]!r}")
    return Answer((run.elapsed_s(),))


def peer(
    way: str,
    model: str,
    *,
    peers: PeerEnvironment,
    variables: Mapping[str, str],
    watch: bool = False,
    num_tokens: int = 1,
    counter: Counter | None = None,
) -> ColdStart:
    """A peer's way, as `peers/first_token.py` names it. Raises `RunError`."""
    command = [str(peers.python), str(PROGRAMS / "first_token.py"), way, model, PROMPT]
    command += ["--tokens", str(num_tokens)]
    with _started(command, variables, [], watch=watch, counter=counter) as run:
        assert run.process.stdout is not None
        run.answer = answers.of_program(run.process.stdout, run.elapsed_s, run.note_sent)
    return run.result()


class StandbyPool:
    """`teneral standby` with one process that waits, and maybe holds memory ahead or has a base in memory, as a
    context manager.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory_bytes: int = 0,
        base: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are for the store that has the base, which is in memory when this returns."""
        name = f"standby-{os.getpid()}-{memory_bytes}{'' if base is None else '-base'}.socket"
        self.path = str(folder / name)
        self._memory_bytes = memory_bytes
        command = [sys.executable, "-m", "teneral", "standby", self.path]
        command += ["--memory", str(memory_bytes)] if memory_bytes else []
        command += [] if base is None else ["--base", base]
        self._process = subprocess.Popen(
            command, env=environment() | dict(variables or {}), stderr=subprocess.PIPE
        )
        self.process_id = self._process.pid
        assert self._process.stderr is not None
        with _killed_after(POOL_TIMEOUT_S, self._process):
            for _ in range(1 if base is None else 2):
                self._process.stderr.readline()  # says that it is ready, and that the base is
        if self._process.poll() is not None:
            raise SystemExit("the standby pool did not start")

    def settle(self) -> None:
        """Return when a process of it waits, with its memory: what one start has taken, the next is to find again."""
        until_s = time.monotonic() + POOL_TIMEOUT_S
        while not any(self._is_ready(child) for child in self._children()):
            if time.monotonic() > until_s:
                raise RunError("the standby pool did not fill up again")
            time.sleep(LOAD_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _children(self) -> list[int]:
        """Those without an order: the others have sessions of their own."""
        path = f"/proc/{self.process_id}/task/{self.process_id}/children"
        children = [int(child) for child in Path(path).read_text().split()]
        return [child for child in children if os.getsid(child) == os.getsid(self.process_id)]

    def _is_ready(self, process_id: int) -> bool:
        """True once its tokenizer has started and all of its memory is resident."""
        try:
            children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
            return bool(children) and self._has_memory(process_id)
        except OSError:  # one of them has just ended
            return False

    def _has_memory(self, process_id: int) -> bool:
        status = Path(f"/proc/{process_id}/status").read_text()
        found = re.search(r"RssAnon:\s*(\d+) kB", status)
        return found is not None and int(found[1]) << 10 >= self._memory_bytes


class _Run:
    """A process from its start to its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        started_s: float,
        memory: MemoryWatch | None,
        counter: Counter | None,
        sent_before_bytes: int,
    ) -> None:
        self.process = process
        self.answer: Answer | None = None
        self.timeline: dict[str, Any] | None = None
        self.peak_rss_bytes = 0
        self._started_s = started_s
        self._memory = memory
        self._counter = counter
        self._sent_before_bytes = sent_before_bytes
        self._sent_bytes: int | None = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def note_sent(self) -> None:
        """The first token came."""
        if self._counter is not None:
            self._sent_bytes = self._counter() - self._sent_before_bytes

    def result(self) -> ColdStart:
        if self.answer is None:
            raise RunError("ended without a token")
        watched = self._memory.peak_bytes if self._memory else None
        return ColdStart(self.answer, self.peak_rss_bytes, watched, self._sent_bytes, self.timeline)


@contextmanager
def _started(
    command: Sequence[str],
    variables: Mapping[str, str],
    roots: Sequence[int],
    *,
    watch: bool,
    counter: Counter | None,
) -> Iterator[_Run]:
    """The process, which has ended when this does. `RunError`s get its last words."""
    with tempfile.TemporaryFile() as log:
        sent_before_bytes = counter() if counter else 0
        started_s = time.monotonic()
        process = subprocess.Popen(command, env=environment(variables), stdout=subprocess.PIPE, stderr=log)
        memory = MemoryWatch(process.pid, *roots) if watch else None
        run = _Run(process, started_s, memory, counter, sent_before_bytes)
        try:
            with _killed_after(RUN_TIMEOUT_S, process), memory or nullcontext():
                yield run
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                run.peak_rss_bytes = usage.ru_maxrss * 1024
            if process.returncode == -signal.SIGKILL:
                note(f"had to be killed after {RUN_TIMEOUT_S:g} s: {shlex.join(command)}")
        except (RunError, OSError, http.client.HTTPException) as error:
            raise RunError(f"{error}\n{_end_of(log)}") from error
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


@contextmanager
def _killed_after(timeout_s: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_of(log: IO[bytes], max_bytes: int = 2000) -> str:
    size_bytes = log.seek(0, os.SEEK_END)
    log.seek(max(0, size_bytes - max_bytes))
    return re.sub(r"[^\n]*\r", "", log.read().decode(errors="replace"))  # progress bars


def _connect(port: int, process: subprocess.Popen[bytes]) -> http.client.HTTPConnection:
    while process.poll() is None:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=RUN_TIMEOUT_S)
        except ConnectionRefusedError:
            time.sleep(PORT_POLL_S)
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = sock
        return connection
    raise RunError(f"the server ended with {process.returncode}")


_JSON = {"content-type": "application/json"}


def _request(num_tokens: int) -> dict[str, object]:
    return {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,  # of the chosen tokens alone: by them they are counted
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _complete_timeline(connection: http.client.HTTPConnection) -> dict[str, Any]:
    """Waits for the end of the load. The caller bounds the time (`_killed_after`)."""
    while True:
        connection.request("GET", "/timeline")
        timeline: dict[str, Any] = json.loads(connection.getresponse().read())
        if predictions.is_complete(timeline):
            return timeline
        time.sleep(LOAD_POLL_S)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
