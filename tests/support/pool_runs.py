"""`teneral pool run` as a real process, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from .standby_processes import WAIT_S

NODE = '[node]\nmemory = "8GiB"\nstandby = 2\n'
SERVE = '[defaults.serve]\nkv_bytes = "8MiB"\nthreads = 1\n'


def pool_file(models: str, head: str = SERVE, node: str = NODE) -> str:
    return f"version = 1\n{head}{models}\n{node}"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """Of a completion."""
        return str(self.json["choices"][0]["text"])


class Load:
    """Threads that ask until their context ends; every answer is kept."""

    def __init__(self, ask: Callable[[int], Answer], num_threads: int = 4, pause_s: float = 0.0) -> None:
        self.answers: list[Answer] = []
        self.lost: list[Exception] = []
        self._ask = ask
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._ask(number))
            except OSError as error:
                self.lost.append(error)
            time.sleep(self._pause_s)


class PoolRun:
    """Listens when its context begins; ends with it."""

    def __init__(
        self, folder: Path, file: str, *flags: str, environment: dict[str, str] | None = None
    ) -> None:
        self.path = folder / "pool.toml"
        self.path.write_text(file)
        self._log = folder / "pool.log"
        command = [sys.executable, "-m", "teneral", "pool", "run", str(self.path), "--port", "0", *flags]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TENERAL_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**inherited, **(environment or {})})
        self.port = 0

    def __enter__(self) -> Self:
        until_s = time.monotonic() + WAIT_S
        while not (found := re.search(r"pool of \d+ models on http://[^:]+:(\d+)", self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until_s, self.log
            time.sleep(0.05)
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def reload(self, file: str) -> None:
        """Change the file, and have it read."""
        self.path.write_text(file)
        self.process.send_signal(signal.SIGHUP)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            lower_case = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, lower_case, answer.read())

    def complete(
        self, model: str, prompt: str = "a b c", headers: dict[str, str] | None = None, **more: Any
    ) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        return self.ask("POST", "/v1/completions", body, headers)

    def pool(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/v1/pool").json)

    def instances(self, model: str) -> list[dict[str, Any]]:
        """The ready ones."""
        return [each for version in self.pool()["models"][model]["versions"] for each in version["instances"]]
