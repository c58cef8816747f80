"""The imports of a loader's process before its task arrives."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from teneral.loader.load.launch import Prepared, is_possible
from teneral.loader.sources.s3.store import ENDPOINT_VARIABLES

LIMIT_S = 30.0

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs memory files")


class _Waiting:
    """A process without a task, once it has imported what follows and waits."""

    def __init__(self) -> None:
        self._prepared = Prepared()
        self._folder = Path("/proc") / str(self._prepared.process.pid)

    def libraries(self) -> str:
        """The names of the files that it has mapped. Blocks until it waits for its task."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            before = self._state()
            time.sleep(0.1)
            is_asleep, names = self._state()
            if is_asleep and "/blake3." in names and (is_asleep, names) == before:
                return names
        raise TimeoutError("it does not wait for its task")

    def _state(self) -> tuple[bool, str]:
        stat = (self._folder / "stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "S", (self._folder / "maps").read_text()

    def close(self) -> None:
        self._prepared.discard()


def test_tls_is_imported_while_there_is_nothing_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with closing(_Waiting()) as waiting:
        assert "/_ssl." in waiting.libraries()


@pytest.mark.parametrize("name", ENDPOINT_VARIABLES)
def test_a_store_of_ones_own_may_do_without_tls(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    with closing(_Waiting()) as waiting:
        assert "/_ssl." not in waiting.libraries()
