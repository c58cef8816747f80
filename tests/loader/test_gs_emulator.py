"""gs:// against gcp-storage-emulator, a server of other authors: see scripts/conformance-stores.

It knows no conditions, gives out no generations with an object's bytes, and breaks on an empty object.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.support.load import patience_s

from teneral.loader.errors import ChangedError, NotFoundError
from teneral.loader.sources.base import Store
from teneral.loader.sources.gs import uploads
from teneral.loader.sources.open import open_store

PYTHON = os.environ.get("GCS_EMULATOR_PYTHON")
DATA = bytes(range(256)) * 4096  # 1 MiB
NAMES = ("blobs/a b+c.bin", "blobs/ü-名.bin", "config.json")

pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="needs GCS_EMULATOR_PYTHON (scripts/conformance-stores)"
)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "gcp_storage_emulator", "-d", str(tmp_path_factory.mktemp("gcs")), "start"]
    command += [f"--port={port}", "--host=127.0.0.1", "--default-bucket=models", "--in-memory"]
    process = subprocess.Popen(command)
    until_s = time.monotonic() + patience_s(20)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture
def store(emulator: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    monkeypatch.setattr(uploads, "CHUNK_BYTES", 512 * 1024)
    opened = open_store("gs://models/team/a model")
    yield opened
    opened.close()


@pytest.mark.parametrize("name", NAMES)
def test_objects_come_back_as_they_were_put(store: Store, name: str) -> None:
    info = store.put(name, DATA)
    assert (info.name, info.size_bytes) == (name, len(DATA))
    assert store.stat(name).size_bytes == len(DATA)
    assert store.read(name, max_bytes=len(DATA))[0] == DATA
    store.delete(name)


def test_a_range_lands_in_its_place(store: Store) -> None:
    store.put("config.json", DATA)
    buffer = bytearray(1000)
    store.read_into("config.json", 17, memoryview(buffer))
    assert buffer == DATA[17:1017]
    with pytest.raises(ChangedError):
        store.read_into("config.json", len(DATA) - 4, memoryview(bytearray(8)))
    store.delete("config.json")


@pytest.mark.parametrize("size_bytes", [10, 512 * 1024, 1024 * 1024, 1024 * 1024 + 17])
def test_a_streamed_object_appears_when_it_is_committed(store: Store, size_bytes: int) -> None:
    data = (DATA + DATA)[:size_bytes]
    with store.create("streamed") as writer:
        writer.write(data)
        with pytest.raises(NotFoundError):
            store.stat("streamed")
    assert store.read("streamed", max_bytes=size_bytes)[0] == data
    store.delete("streamed")


def test_objects_are_listed_by_prefix(store: Store) -> None:
    for name in NAMES:
        store.put(name, b"x")
    assert [info.name for info in store.list()] == sorted(NAMES)
    assert [info.name for info in store.list("blobs/")] == sorted(NAMES)[:2]
    for name in NAMES:
        store.delete(name)
        store.delete(name)
    assert list(store.list()) == []


def test_a_missing_object_and_a_missing_bucket_are_distinguished(store: Store) -> None:
    with pytest.raises(NotFoundError, match="there is no none"):
        store.stat("none")
    missing = open_store("gs://no-such-bucket/x")
    with pytest.raises(NotFoundError):
        missing.stat("none")
    missing.close()
