"""A `teneral serve` process that keeps running, and requests to it.

Unlike a cold start (`cold_starts.py`), what is measured here begins when all weights are there.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self

from benchmarks import answers
from benchmarks.answers import Answer
from benchmarks.processes import RunError, environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0
POLL_S = 0.02
HOST = "127.0.0.1"
_JSON = {"content-type": "application/json"}


class RefusedError(RunError):
    """A server that ended by itself before it was ready."""


class Program:
    """A process that listens at a port of this machine, as a context manager.

    `started_s` is the moment of its start, on `time.monotonic()`'s clock. A `RunError` has its last words.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], variables: Mapping[str, str] = {}) -> None:
        """`command` takes the port."""
        self.port = free_port()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.started_s = time.monotonic()
        self._process = subprocess.Popen(
            command(self.port), env=environment(variables), stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def stop(self) -> None:
        """Tell it to end, and wait until it has: it drains. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def connect(self, *, poll_s: float = POLL_S) -> http.client.HTTPConnection:
        """A connection, made once the port is open. Raises `RefusedError`."""
        while self._process.poll() is None:
            connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_TIMEOUT_S)
            try:
                connection.connect()
            except ConnectionRefusedError:
                time.sleep(poll_s)
                continue
            assert isinstance(connection.sock, socket.socket)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        raise RefusedError(self._last_words())

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if self.url not in line)[-1000:].strip()


class Server(Program):
    """`teneral serve`, which gives the model the name "model"."""

    def __init__(self, model: str, *flags: str, variables: Mapping[str, str] = {}) -> None:
        def command(port: int) -> list[str]:
            own = ["--host", HOST, "--port", str(port), "--name", "model", "--log-level", "error"]
            return [sys.executable, "-m", "teneral", "serve", model, *flags, *own]

        super().__init__(command, variables)

    def wait_ready(self) -> Self:
        """Until all weights are exact."""
        deadline_s = self.started_s + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._state() == "ready":
                return self
            time.sleep(POLL_S)
        raise RunError(f"not ready after {START_TIMEOUT_S:g} s\n{self._last_words()}")

    def complete(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        since_s: float | None = None,
        model: str = "model",
        first_token: str = "exact",
    ) -> Answer:
        """Greedily, over a connection of its own; token times count from `since_s`, or from when the request was sent.
        Raises `RunError`.
        """
        connection = self.connect()
        try:
            start_s = time.monotonic() if since_s is None else since_s
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(
                    {
                        **completion(prompt, num_tokens),
                        "model": model,
                        "teneral": {"first_token": first_token},
                    }
                ),
                _JSON,
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RunError(f"{response.status} {response.read(500)!r}")
            return answers.of_stream(response, lambda: time.monotonic() - start_s, lambda: None)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"{error}\n{self._last_words()}") from error
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A route's answer, None for an empty one. Raises `RunError` for all but 200."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body), _JSON)
            response = connection.getresponse()
            data = response.read()
            if response.status != http.HTTPStatus.OK:
                raise RunError(f"{path}: {response.status} {data[:500]!r}")
            return json.loads(data) if data else None
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"{error}\n{self._last_words()}") from error
        finally:
            connection.close()

    def _state(self) -> str:
        connection = self.connect()
        try:
            connection.request("GET", "/readyz")
            return str(json.loads(connection.getresponse().read())["state"])
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()


def completion(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """The body of a request for that number of tokens, as a stream."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,  # of the chosen tokens alone: by them they are counted
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])
