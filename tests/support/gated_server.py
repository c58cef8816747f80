"""`teneral serve` of the demo's model in the middle of its start: the port is open, and the web server comes later."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from tests.support.load import patience_s
from tests.support.ports import free_port

MODEL = Path(__file__).parents[2] / "demo" / "model"
HANDLER = """
import pathlib, time
while not pathlib.Path({gate!r}).exists():
    time.sleep(0.01)
def handler(event, context):
    return event
"""


class GatedServer:
    """A server whose function is imported once `let_start` was called, and the web server is ready after that."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """Returns when the port is open."""
        self._gate = folder / "gate"
        (folder / "gated.py").write_text(HANDLER.format(gate=str(self._gate)))
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        command = [sys.executable, "-m", "teneral", "serve", str(MODEL), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--handler", f"{folder}/gated.py:handler", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until_s = time.monotonic() + patience_s(30)
        while True:
            try:
                socket.create_connection(self.address).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < until_s, "the port did not open"
                time.sleep(0.01)

    def let_start(self) -> None:
        self._gate.touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
