"""From a model directory to an artifact and back, with the real stores in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_objects, read_back
from tests.support.store_server import StoreServer

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import AlreadyExistsError, NotFoundError
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.s3.store import S3Store
from teneral.loader.tools.garbage import collect_garbage
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify

OpenStore = Callable[[str], S3Store]


@pytest.fixture
def server(tmp_path: Path):
    with StoreServer(tmp_path / "buckets") as server:
        server.objects.make_bucket("models")
        yield server


@pytest.fixture
def s3(server: StoreServer):
    opened: list[S3Store] = []

    def open_store(folder: str) -> S3Store:
        opened.append(S3Store(f"s3://models/{folder}", SourceOptions(endpoint_url=server.url)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def test_a_model_goes_from_disk_through_s3_and_back(
    tmp_path: Path, s3: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    contents = llama_contents(hidden=256, tied=True)
    for name, data in model_objects(contents, num_shards=2).items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    result = pack(FileStore(tmp_path / "model"), s3("packed"))
    assert verify(s3("packed"), digest=result.manifest.digest).ok
    unpack(s3("packed"), tmp_path / "back", max_shard_bytes=500_000)
    assert read_back(path.read_bytes() for path in (tmp_path / "back").glob("*.safetensors")) == contents
    with pytest.raises(AlreadyExistsError):
        pack(FileStore(tmp_path / "model"), s3("packed"))
    pack(FileStore(tmp_path / "model"), s3("packed"), force=True)
    assert verify(s3("packed")).ok
    assert sum("/draft-" in info.name for info in s3("packed").list()) == 2  # the old one is kept for a day
    collect_garbage(s3("packed"), older_than_s=0)
    assert sum("/draft-" in info.name for info in s3("packed").list()) == 1
    assert verify(s3("packed")).ok


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_model_that_only_a_web_server_has_is_packed(
    server: StoreServer, s3: OpenStore, num_shards: int
) -> None:
    contents = llama_contents()
    raw = s3("raw")
    for name, data in model_objects(contents, num_shards=num_shards).items():
        raw.put(name, data)
    web = HttpSource(f"{server.url}/models/raw")
    pack(web, s3("packed"))
    web.close()
    packed = HttpSource(f"{server.url}/models/packed")
    assert set(open_artifact(packed).by_name) == set(contents)
    assert verify(packed).ok
    packed.close()


def test_an_empty_prefix_is_not_found(server: StoreServer, s3: OpenStore) -> None:
    with pytest.raises(NotFoundError, match="nothing at"):
        open_artifact(s3("nowhere"))
