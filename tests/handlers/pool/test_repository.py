"""Versions in folders and buckets: which are there, and which of them are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from benchmarks.store import store_variables
from tests.support.onnx_models import tabular
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.handlers.pool.deployment import Deployment
from teneral.handlers.pool.file import PoolFileError, parse_pool
from teneral.handlers.pool.process import OVERHEAD_BYTES, instance_config
from teneral.handlers.pool.repository import ReleaseRepository, models_in
from teneral.handlers.pool.values import Model, Shadow, Versions
from teneral.loader.errors import AccessDeniedError, NotFoundError, TeneralError, UsageError
from teneral.runtime.config import ServeConfig


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/` with a packed version 9, a plain version 10, and what is no version."""
    folder = tmp_path_factory.mktemp("repository") / "model"
    save_tiny("llama", folder / "10")
    assert cli.run(["pack", str(folder / "10"), str(folder / "9"), "--quiet"]) == 0
    for name in ("07", "next", "-1", "1.5"):
        shutil.copytree(folder / "10", folder / name)
    (folder / "11").write_text("a file")
    return folder.parent


def served(repository: Path, **settings: object) -> list[int | None]:
    model = Model("m", str(repository / "model" / "{version}"), **settings)  # type: ignore[arg-type]
    releases, _ = ReleaseRepository(repository).releases(model)
    return [release.version for release in releases]


def test_versions_are_numbers_and_the_greatest_is_the_latest(repository: Path) -> None:
    assert served(repository) == [10]
    assert served(repository, versions=Versions(latest=5)) == [9, 10]
    assert served(repository, versions=Versions(latest=None)) == [9, 10]
    assert served(repository, versions=Versions(latest=None, numbers=(9, 12))) == [9]


def test_a_version_that_is_not_whole_gives_way_to_the_one_before(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "copy")
    (tmp_path / "copy" / "model" / "10" / "config.json").unlink()
    (tmp_path / "copy" / "model" / "12").mkdir()
    model = Model("m", str(tmp_path / "copy" / "model" / "{version}"))
    releases, trouble = ReleaseRepository(tmp_path).releases(model)
    assert [release.version for release in releases] == [9]
    assert "version 12" in trouble


@pytest.mark.parametrize(
    "settings",
    [
        {"versions": Versions(latest=None, numbers=(9, 12))},
        {"versions": Versions(latest=2), "traffic": {9: 50, 12: 50}},
        {"versions": Versions(latest=2), "traffic": {9: 100}, "shadow": Shadow(12, 5)},
    ],
)
def test_a_version_that_the_file_names_and_that_is_not_there_is_reported(
    repository: Path, settings: dict[str, Any]
) -> None:
    model = Model("m", str(repository / "model" / "{version}"), **settings)
    releases, trouble = ReleaseRepository(repository).releases(model)
    assert 9 in [release.version for release in releases]
    assert trouble == "version 12, which the pool file names, is not there"


def test_a_release_changes_its_revision_with_its_bytes(repository: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(repository / "model" / "10", tmp_path / "plain")
    known = ReleaseRepository(tmp_path)
    model = Model("m", "plain")  # relative to the pool file
    (before,), _ = known.releases(model)
    assert before.address == str(folder)
    assert before.weight_bytes > 0
    (folder / "tokenizer_config.json").write_text("{}")
    (after,), _ = known.releases(model)
    assert after.revision != before.revision
    assert known.releases(model)[0] == (after,)


def test_models_may_share_an_address(repository: Path) -> None:
    known = ReleaseRepository(repository)
    address = str(repository / "model" / "9")
    (alone,), _ = known.releases(Model("a", address))
    both, _ = known.releases(
        Model("b", str(repository / "model" / "{version}"), versions=Versions(latest=None))
    )
    assert (alone.version, [release.version for release in both]) == (None, [9, 10])


@pytest.fixture
def store(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A store whose bucket is the repository, and the environment's settings for it."""
    with StoreServer(repository.parent) as server:
        for name, value in store_variables(server.url).items():
            monkeypatch.setenv(name, value)
        yield server


def test_versions_of_a_bucket_are_found_and_a_start_reads_their_stored_bytes(
    repository: Path, store: StoreServer
) -> None:
    address = f"s3://{repository.name}"
    sources = models_in(address)
    assert sources == {"model": f"{address}/model/{{version}}"}
    model = Model("m", sources["model"], versions=Versions(latest=None))
    releases, trouble = ReleaseRepository(repository).releases(model)
    assert trouble == ""
    assert [(each.version, each.address) for each in releases] == [
        (9, f"{address}/model/9"),
        (10, f"{address}/model/10"),
    ]
    packed, plain = releases
    assert packed.weight_bytes == plain.weight_bytes == plain.stored_bytes
    assert 0 < packed.stored_bytes < packed.weight_bytes


def test_a_version_that_the_store_refused_once_is_read_again(repository: Path, store: StoreServer) -> None:
    model = Model("m", f"s3://{repository.name}/model/9")
    known = ReleaseRepository(repository)
    refusal = Fault(status=403, code="AccessDenied")
    store.set_fault(lambda request: refusal if request.method == "GET" and request.key else None)
    with pytest.raises(AccessDeniedError):
        known.releases(model)
    store.set_fault(None)
    (release,), trouble = known.releases(model)
    assert (release.address, trouble) == (f"s3://{repository.name}/model/9", "")


def test_a_rejected_release_is_left_out(repository: Path) -> None:
    model = Model("m", str(repository / "model" / "{version}"))
    known = ReleaseRepository(repository)
    (newest,), _ = known.releases(model)
    (older,), trouble = known.releases(model, without={(10, newest.revision): "rolled back by a client"})
    assert older.version == 9
    assert trouble == "version 10: rolled back by a client"


def test_a_pinned_version_must_be_that_one(repository: Path) -> None:
    model = Model(
        "m", str(repository / "model" / "{version}"), versions=Versions(None, (9,)), pins={9: "00" * 32}
    )
    with pytest.raises(TeneralError):
        ReleaseRepository(repository).releases(model)


def test_nothing_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("empty/{version}", "nowhere/{version}", "nowhere"):
        with pytest.raises(NotFoundError):
            ReleaseRepository(tmp_path).releases(Model("m", source))


def test_models_of_a_repository_are_found_and_take_the_files_defaults(repository: Path) -> None:
    found = models_in(str(repository))
    assert list(found) == ["model"]
    pool = parse_pool("version = 1\n[defaults]\nmin_warm = 2\n", found=found)
    assert (pool.models["model"].min_warm, pool.models["model"].is_versioned) == (2, True)
    own = parse_pool('version = 1\n[models.Model]\nsource = "/mine"\n', found=found)
    assert [model.source for model in own] == ["/mine"]
    with pytest.raises(UsageError):
        models_in("https://host/models")
    with pytest.raises(PoolFileError):
        parse_pool("version = 1\n", found={})


def test_a_fine_tune_is_whole_when_its_base_is_there(tmp_path: Path) -> None:
    for name, seed in (("base-plain", 0), ("plain", 1)):
        save_tiny("llama", tmp_path / name, seed=seed)
    pack = ["pack", str(tmp_path / "base-plain"), str(tmp_path / "base"), "--quiet"]
    assert cli.run(pack) == 0
    # Of other weights nearly all is stored whole: the norms' differences are not.
    (tmp_path / "plain" / "model.safetensors").unlink()
    shutil.copy(tmp_path / "base-plain" / "model.safetensors", tmp_path / "plain")
    pack = ["pack", str(tmp_path / "plain"), str(tmp_path / "tuned" / "3"), "--quiet"]
    assert cli.run([*pack, "--base", str(tmp_path / "base")]) == 0

    known = ReleaseRepository(tmp_path)
    with pytest.raises(UsageError, match="only the differences to"):
        known.releases(Model("m", "tuned/3"))
    model = Model("m", "tuned/{version}", base="base")
    (release,), trouble = known.releases(model)
    assert (release.base, trouble) == (str(tmp_path / "base"), "")
    assert release.weight_bytes == known.releases(Model("m", "base"))[0][0].weight_bytes
    assert release.address == str(tmp_path / "tuned" / "3")

    (tmp_path / "base").rename(tmp_path / "away")
    fresh = ReleaseRepository(tmp_path)
    with pytest.raises(NotFoundError):
        fresh.releases(model)
    (tmp_path / "away").rename(tmp_path / "base")
    assert fresh.releases(model)[0] == (release,)


def test_paths_of_serve_settings_are_relative_to_the_pool_file_as_sources_are(
    repository: Path, tmp_path: Path
) -> None:
    text = """
version = 1
[models.m]
source = "model/{version}"
[models.m.serve]
adapters = "adapters/{name}"
chat_template = "/etc/chat.jinja"
kv_snapshot = "s3://bucket/kv"
handler = "summarise.py:handler"
"""
    pool = parse_pool(text, str(repository / "pool.toml"))
    model = pool.models["m"]
    (release,), _ = ReleaseRepository(pool.folder).releases(model)
    config = instance_config(pool, model, release, tmp_path, {})
    assert config.adapters == str(repository / "adapters" / "{name}")
    assert config.handler == str(repository / "summarise.py:handler")
    assert (config.chat_template, config.kv_snapshot) == ("/etc/chat.jinja", "s3://bucket/kv")
    in_module = parse_pool(text.replace("summarise.py", "package.module"), str(repository / "pool.toml"))
    config = instance_config(in_module, in_module.models["m"], release, tmp_path, {})
    assert config.handler == "package.module:handler"


def test_encoders_and_onnx_models_need_no_memory_for_keys_and_values(
    repository: Path, tmp_path: Path
) -> None:
    save_tiny("bert", tmp_path / "plain")
    assert cli.run(["pack", str(tmp_path / "plain"), str(tmp_path / "packed"), "--quiet"]) == 0
    onnx.save(tabular().model, tmp_path / "table.onnx")
    assert cli.run(["pack", str(tmp_path / "table.onnx"), str(tmp_path / "table"), "--quiet"]) == 0
    decoder = str(repository / "model" / "9")
    needs = {}
    for address in ("plain", "packed", "table", decoder):
        model = Model("m", address)
        (release,), _ = ReleaseRepository(tmp_path).releases(model)
        config = ServeConfig(model=release.address, kv_bytes=1 << 30)
        needs[address] = Deployment(model, release, config).need_bytes - release.weight_bytes
    assert needs == dict.fromkeys(("plain", "packed", "table"), OVERHEAD_BYTES) | {
        decoder: OVERHEAD_BYTES + (1 << 30)
    }
