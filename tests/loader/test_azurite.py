"""az:// against Azurite, Microsoft's emulator: see scripts/conformance-stores.

It answers a range of an empty blob as Azure does not, so none is read here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator

import pytest
from tests.support.az_server import FOREIGN
from tests.support.inspection import authorized
from tests.support.load import patience_s

from teneral.loader.errors import AccessDeniedError, AlreadyExistsError, ChangedError, NotFoundError
from teneral.loader.sources.az.store import AzStore
from teneral.loader.sources.http.tokens import exchange

COMMAND = os.environ.get("AZURITE_BLOB")
ACCOUNT, KEY = "teneraltest", b64encode(b"a key of the emulator's account").decode()
DATA = bytes(range(256)) * 4096  # 1 MiB
NAMES = ("blobs/a b+c.bin", "blobs/ü-名.bin", "config.json")

pytestmark = pytest.mark.skipif(COMMAND is None, reason="needs AZURITE_BLOB (scripts/conformance-stores)")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command = [str(COMMAND), *flags, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"})
    until_s = time.monotonic() + patience_s(30)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    process.terminate()
    process.wait()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzStore]:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    text = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    opened = AzStore("az://models/team/a model")
    container = authorized(opened, "PUT", "", (("restype", "container"),), ())
    assert exchange(container)[0].status in (201, 409)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", NAMES)
def test_objects_come_back_with_their_version(store: AzStore, name: str) -> None:
    info = store.put(name, DATA)
    assert store.stat(name) == info
    assert store.read(name, max_bytes=len(DATA)) == (DATA, info)
    buffer = bytearray(1000)
    store.read_into(name, 17, memoryview(buffer), version=info.version)
    assert buffer == DATA[17:1017]
    store.delete(name)
    store.delete(name)


def test_conditions_hold(store: AzStore) -> None:
    first = store.put("once", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        store.put("once", b"second", if_absent=True)
    store.put("once", b"second", if_version=first.version)
    with pytest.raises(AlreadyExistsError):
        store.put("once", b"third", if_version=first.version)
    with pytest.raises(ChangedError):
        store.read_into("once", 0, memoryview(bytearray(2)), version=first.version)
    store.delete("once")
    with pytest.raises(AlreadyExistsError):
        store.put("once", b"fourth", if_version=first.version)


def test_blocks_become_an_object_once(store: AzStore) -> None:
    data = DATA * 9
    with store.create("big", if_absent=True) as writer:
        writer.write(data)
        with pytest.raises(NotFoundError):
            store.stat("big")
        info = writer.commit()
    assert store.read("big", max_bytes=len(data)) == (data, info)
    late = store.create("big", if_absent=True)
    late.write(data)
    with pytest.raises(AlreadyExistsError):
        late.commit()
    store.delete("big")


def test_objects_are_listed_by_prefix(store: AzStore) -> None:
    infos = [store.put(name, b"x") for name in sorted(NAMES)]
    listed = [info._replace(modified_unix_s=None) for info in store.list()]
    assert listed == infos
    assert [info.name for info in store.list("blobs/")] == [info.name for info in infos[:2]]
    for name in NAMES:
        store.delete(name)


def test_refusals_are_distinguished(store: AzStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="there is no none"):
        store.stat("none")
    missing = AzStore("az://no-such-container/x")
    with pytest.raises(NotFoundError, match="container"):
        missing.stat("none")
    missing.close()
    text = os.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(KEY, "d3Jvbmc=")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    wrong = AzStore("az://models/x")
    with pytest.raises(AccessDeniedError):
        wrong.stat("none")
    wrong.close()
