"""Whole loads with a part cache: the second asks the store for the manifest only, and no damage to the cache shows."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.artifacts import build_artifact
from tests.support.checkpoints import llama_contents, model_store
from tests.support.load import patience_s
from tests.support.paced import PacedSource, reads_of
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_disk import tiny_disk
from tests.support.weight_loads import start_process_load

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.cache.part_cache import PartCache
from teneral.loader.cache.writer import CacheStatistics
from teneral.loader.errors import AccessDeniedError, IntegrityError
from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.load.accounting import LoadStatistics
from teneral.loader.load.launch import is_possible
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.open import open_source
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cached")
    pack(model_store(llama_contents(num_layers=3)), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture
def server(root: Path) -> Iterator[StoreServer]:
    with StoreServer(root) as server:
        yield server


def options(cache: Path) -> LoadOptions:
    return LoadOptions(connections=4, cache_dir=str(cache), cache_bytes=1 << 30)


def load(url: str, cache: Path) -> tuple[dict[str, bytes], LoadStatistics]:
    """All tensors' bytes by name, and what the load cost, once the cache has taken what it takes."""
    with closing(open_source(url)) as source:
        manifest = open_artifact(source)
        with WeightLoad(source, manifest, options=options(cache)) as load:
            load.start()
            content = content_of(load, manifest)
            assert load.join(WAIT_S)
            assert load.join_cache(WAIT_S)
            return content, load.statistics()


def content_of(load: WeightLoad, manifest: Manifest) -> dict[str, bytes]:
    for group in manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)
    return {tensor.name: load.array(tensor.name).tobytes() for tensor in manifest.tensors}


def cache_of(statistics: LoadStatistics | None) -> CacheStatistics:
    assert statistics is not None
    assert statistics.cache is not None
    return statistics.cache


def keys(server: StoreServer) -> set[str]:
    """The objects that were asked for since the last time, without their folder."""
    found = {entry.key.removeprefix("model/") for entry in server.log()}
    server.clear_log()
    return found


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("teneral-parts-*/" + "?" * 64))


def test_the_second_load_asks_the_store_for_the_manifest_only(server: StoreServer, tmp_path: Path) -> None:
    url = f"{server.url}/bucket/model"
    first, cost = load(url, tmp_path)
    assert any(key.startswith("blobs/") for key in keys(server))
    second, saved = load(url, tmp_path)
    assert keys(server) == {"manifest.json"}
    assert first == second
    assert cache_of(cost).written_bytes == cost.stored_bytes
    assert cache_of(saved).read_bytes == saved.stored_bytes
    assert cache_of(saved).num_misses == 0
    assert cache_of(saved).troubles == ()


def test_of_parts_that_are_read_together_the_store_is_asked_for_those_that_are_not_cached(
    tmp_path: Path,
) -> None:
    built = build_artifact([("only", {"w": ("BF16", (300, 64))})], draft_elements=3_000)
    drafts = built.parts_of("only", Tier.DRAFT)
    source = PacedSource(built.store)
    with WeightLoad(source, built.manifest, options=options(tmp_path)) as load:
        load.start()
        assert load.join(WAIT_S)
        assert load.join_cache(WAIT_S)
        assert load.statistics().num_reads < len(built.manifest.parts)
        expected = load.array("w").tobytes()
    lost = {drafts[1], drafts[3]}
    for path in entries(tmp_path):
        if path.name in {(part.digest or b"").hex() for part in lost}:
            path.unlink()
    source.calls.clear()
    with WeightLoad(source, built.manifest, options=options(tmp_path)) as load:
        load.start()
        assert load.join(WAIT_S)
        assert load.array("w").tobytes() == expected
    asked = {(call.start, call.end) for call in source.calls}
    assert asked == {(part.offset_bytes, part.offset_bytes + part.size_bytes) for part in lost}


@pytest.mark.skipif(not is_possible(), reason="this system has no memory files")
def test_a_load_in_a_process_of_its_own_fills_the_cache_and_uses_it(
    server: StoreServer, roomy_path: Path
) -> None:
    url = f"{server.url}/bucket/model"
    slabs = []
    for _ in range(2):
        keys(server)
        with start_process_load(url, options=options(roomy_path)) as load:
            for group in load.manifest.groups:
                load.wait(group.index, timeout_s=WAIT_S)
            slabs.append([load.slab(group.index).tobytes() for group in load.manifest.groups])
            assert load.join(WAIT_S)
            statistics = load.statistics()
    assert keys(server) == {"manifest.json"}
    assert slabs[0] == slabs[1]
    assert cache_of(statistics).num_misses == 0


def test_another_artifact_with_the_same_weights_shares_their_parts(root: Path, tmp_path: Path) -> None:
    pack(model_store(llama_contents(num_layers=3)), FileStore(root / "bucket" / "copy"))
    load(str(root / "bucket" / "model"), tmp_path)
    _, statistics = load(str(root / "bucket" / "copy"), tmp_path)
    assert cache_of(statistics).num_misses == 0


def test_without_access_to_the_store_nothing_comes_from_the_cache(
    server: StoreServer, tmp_path: Path
) -> None:
    url = f"{server.url}/bucket/model"
    load(url, tmp_path)
    server.set_fault(lambda _: Fault(status=403, code="AccessDenied"))
    with pytest.raises(AccessDeniedError):
        load(url, tmp_path)


def test_damaged_parts_come_from_the_store_and_are_replaced(server: StoreServer, tmp_path: Path) -> None:
    url = f"{server.url}/bucket/model"
    right, _ = load(url, tmp_path)
    for number, path in enumerate(entries(tmp_path)):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data[: len(data) - number % 2])  # some are cut as well
    got, statistics = load(url, tmp_path)
    assert got == right
    assert cache_of(statistics).num_rejected == len(entries(tmp_path)) > 3
    _, again = load(url, tmp_path)
    assert cache_of(again).num_misses == cache_of(again).num_rejected == 0


def test_a_damaged_part_on_disk_does_not_use_up_the_stores_second_chance(tmp_path: Path) -> None:
    built = build_artifact([("only", {"w": ("BF16", (100, 64))})])
    (part, *_) = built.manifest.parts
    run(PacedSource(built.store), built.manifest, tmp_path)
    assert part.digest is not None
    spoil(tmp_path, part.digest)
    source = PacedSource(built.store)
    source.spoil(reads_of(built.manifest, part), times=1)
    statistics = run(source, built.manifest, tmp_path)
    assert statistics.num_refetched_parts == 2
    spoil(tmp_path, part.digest)
    source = PacedSource(built.store)
    source.spoil(reads_of(built.manifest, part), times=2)
    with pytest.raises(IntegrityError, match="also when fetched again"):
        run(source, built.manifest, tmp_path)


def run(source: PacedSource, manifest: Manifest, cache: Path) -> LoadStatistics:
    with WeightLoad(source, manifest, options=options(cache)) as load:
        load.start()
        content_of(load, manifest)
        assert load.join(WAIT_S)
        assert load.join_cache(WAIT_S)
        return load.statistics()


def spoil(cache: Path, digest: bytes) -> None:
    (path,) = cache.glob(f"teneral-parts-*/{digest.hex()}")
    path.write_bytes(bytes(path.stat().st_size))


def test_parts_evicted_in_the_middle_of_a_load_come_from_the_store(tmp_path: Path) -> None:
    built = build_artifact([(f"layers.{number}", {f"w{number}": ("BF16", (300, 64))}) for number in range(6)])
    run(PacedSource(built.store), built.manifest, tmp_path)
    first = built.manifest.parts_of(0, built.manifest.parts[0].tier)[0]
    assert first.digest is not None
    (tmp_path / f"teneral-parts-{os.geteuid()}" / first.digest.hex()).unlink()
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, first))
    settings = LoadOptions(connections=1, cache_dir=str(tmp_path))
    with WeightLoad(source, built.manifest, options=settings) as load:
        load.start()
        held.wait_reached()
        for path in entries(tmp_path)[::2]:
            path.unlink()
        held.release()
        content = content_of(load, built.manifest)
    assert all(content[name] == data.tobytes() for name, data in built.originals.items())
    statistics = cache_of(load.statistics())
    assert statistics.num_misses > 1
    assert statistics.num_hits > 0


def test_a_read_only_cache_serves_a_load(server: StoreServer, tmp_path: Path) -> None:
    url = f"{server.url}/bucket/model"
    with tiny_disk(tmp_path / "disk", 64 << 20) as disk:
        right, _ = load(url, disk)
        damaged = entries(disk)[0]
        damaged.write_bytes(bytes(damaged.stat().st_size))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        keys(server)
        got, statistics = load(url, disk)
    assert got == right
    assert cache_of(statistics).num_rejected == 1
    assert any("cannot be removed" in trouble for trouble in cache_of(statistics).troubles)


@pytest.mark.parametrize("place", ["/proc/no/such", "/dev/null", "\ud800"])
def test_a_cache_that_cannot_be_made_costs_a_warning(root: Path, place: str) -> None:
    content, statistics = load(str(root / "bucket" / "model"), Path(place))
    assert content
    assert statistics.num_refetched_parts == 0
    assert any("nothing more is read" in trouble for trouble in cache_of(statistics).troubles)


def test_a_full_disk_does_not_disturb_a_load(root: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 64 << 10) as disk:
        content, statistics = load(str(root / "bucket" / "model"), disk)
        again, _ = load(str(root / "bucket" / "model"), disk)
    assert content == again
    assert cache_of(statistics).num_dropped > 0


def test_loads_side_by_side_share_a_cache_that_is_too_small_for_both(root: Path, tmp_path: Path) -> None:
    pack(model_store(llama_contents(num_layers=3, hidden=48)), FileStore(root / "bucket" / "other"))
    urls = [str(root / "bucket" / name) for name in ("model", "other")]
    expected = {url: load(url, tmp_path / "large")[0] for url in urls}
    budget_bytes = sum(path.stat().st_size for path in entries(tmp_path / "large")) // 2
    wrong: list[str] = []

    def repeat(url: str) -> None:
        for _ in range(4):
            source = open_source(url)
            manifest = open_artifact(source)
            settings = LoadOptions(connections=2, cache_dir=str(tmp_path / "small"), cache_bytes=budget_bytes)
            with WeightLoad(source, manifest, options=settings) as load:
                load.start()
                if content_of(load, manifest) != expected[url]:
                    wrong.append(url)
                load.join_cache(WAIT_S)

    threads = [threading.Thread(target=repeat, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    assert sum(path.stat().st_size for path in entries(tmp_path / "small")) <= budget_bytes


def test_plain_safetensors_are_not_cached_and_this_is_logged_once(tmp_path: Path) -> None:
    source = model_store(llama_contents(num_layers=2))
    manifest = open_artifact(source)
    with WeightLoad(source, manifest, options=options(tmp_path)) as load:
        load.start()
        content_of(load, manifest)
        (trouble,) = cache_of(load.statistics()).troubles
    assert "pack the model" in trouble
    assert list(tmp_path.iterdir()) == []


def test_a_load_without_a_cache_says_so(root: Path) -> None:
    source = FileStore(root / "bucket" / "model")
    load = WeightLoad(source, open_artifact(source))
    assert load.statistics().cache is None


# small files


def test_small_files_are_kept_by_their_digests_too(server: StoreServer, tmp_path: Path) -> None:
    source = open_source(f"{server.url}/bucket/model", SourceOptions())
    manifest = open_artifact(source)
    (right, again) = (read_cached(source, manifest, tmp_path) for _ in range(2))
    assert right == again
    assert len([entry for entry in server.log() if entry.key.endswith("config.json")]) == 1
    source.close()


def test_a_damaged_small_file_comes_from_the_store(root: Path, tmp_path: Path) -> None:
    source = FileStore(root / "bucket" / "model")
    manifest = open_artifact(source)
    right = read_cached(source, manifest, tmp_path)
    (path,) = entries(tmp_path)
    path.write_bytes(bytes(path.stat().st_size))
    assert read_cached(source, manifest, tmp_path) == right
    assert path.read_bytes() == right


def read_cached(source: object, manifest: Manifest, directory: Path) -> bytes:
    cache = PartCache(directory, budget_bytes=1 << 20)
    data = read_file(source, manifest, "config.json", cache=cache)  # type: ignore[arg-type]
    cache.finish()
    assert cache.join(WAIT_S)
    return data
