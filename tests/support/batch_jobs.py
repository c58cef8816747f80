"""Batch jobs for tests: inputs and outputs, an instance with a tiny model, and workers in processes that can be killed.

As a program it is a nursery of workers: it imports everything once, and then forks a worker for each line of its
standard input, which is a JobSpec's fields as JSON. A worker's process id comes back, and its exit code once it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.load import patience_s

WAIT_S = patience_s(60)
SETTINGS = {
    "loader": "thread",
    "threads": 1,
    "max_running": 8,
    "kv_bytes": 4 << 20,
    "log_level": "error",
}


def write_lines(path: Path, lines: list[Any]) -> Path:
    """An input: texts and bytes as they are, everything else as JSON."""
    encoded = [
        line
        if isinstance(line, bytes)
        else line.encode()
        if isinstance(line, str)
        else json.dumps(line).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def prompts(count: int, **options: Any) -> list[dict[str, Any]]:
    """Plain lines whose answers differ, greedy."""
    return [
        {
            "custom_id": f"id-{number}",
            "prompt": f"{number}: {'abc' * (number % 7)}",
            "max_tokens": 4,
            "temperature": 0,
        }
        | options
        for number in range(count)
    ]


def read_records(output: Path) -> list[dict[str, Any]]:
    """Of a .jsonl output, or of a folder's parts."""
    if output.is_dir():
        return [json.loads(line) for part in sorted((output / "parts").iterdir()) for line in _lines(part)]
    return [json.loads(line) for line in _lines(output)]


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return data.split(b"\n")[:-1]


def config_of(model: str | Path, **settings: Any) -> Any:
    from teneral.runtime.config import ServeConfig

    return ServeConfig(model=str(model), **{**SETTINGS, **settings})


class Workers:
    """The nursery, from outside."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "tests.support.batch_jobs", str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == {"ready": True}

    def start(self, **spec: Any) -> int:
        """A worker's process id."""
        self._write(spec)
        return int(self._read()["pid"])

    def wait(self, pid: int, *, status: Callable[[int], bool] = lambda code: code == 0) -> int:
        """Until it has ended; its exit code, below 0 for a signal."""
        self._write({"wait": pid})
        code = int(self._read()["code"])
        assert status(code), f"the worker ended with {code}"
        return code

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid, status=lambda _: True)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._process.stdout.close()

    def _write(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def workers_of(model: Path) -> Iterator[Workers]:
    workers = Workers(model)
    try:
        yield workers
    finally:
        workers.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.002)


def num_parts(work: Path) -> int:
    """That are visible."""
    folder = work / "parts"
    return sum(path.suffix == ".jsonl" for path in folder.iterdir()) if folder.exists() else 0


def _work(model: str, fields: dict[str, Any]) -> int:
    from teneral.handlers.batch.command import exit_code, run_batch
    from teneral.handlers.batch.spec import JobSpec, Share

    worker = fields.pop("worker", None)
    deadline_s = fields.pop("deadline_s", None)
    settings = fields.pop("settings", {})
    spec = JobSpec(share=Share.parse(worker) if worker else None, **fields)
    return exit_code(run_batch(spec, config_of(model, **settings), deadline_s=deadline_s, quiet=True))


def _nursery(model: str) -> None:
    import torch

    import teneral.handlers.app
    import teneral.handlers.batch.command
    import teneral.runtime.engine.engine
    import teneral.runtime.models.build  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        if "wait" in fields:
            _, status = os.waitpid(fields["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                code = _work(model, fields)
            except BaseException as error:
                print(f"worker: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    _nursery(sys.argv[1])
