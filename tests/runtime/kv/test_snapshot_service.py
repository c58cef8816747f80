"""A server's snapshot comes into its pool or is gone on without; it is saved in time, or stays as it was."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from msgspec.structs import replace
from tests.support.inspection import after_save
from tests.support.kv_snapshots import BLOCK_SIZE, MODEL, WAIT_S, Pool, Service, tokens_of, write

from teneral.loader.errors import NotFoundError, SourceClosedError
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.kv.snapshots import service as snapshot_service
from teneral.runtime.kv.snapshots.parts import open_snapshot
from teneral.runtime.kv.snapshots.snapshot import SNAPSHOT_NAME
from teneral.runtime.kv.storage import KVStorage, PoolShape
from teneral.runtime.tensors import DType


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "kv")


def prefix_names(store):
    return [prefix.name for prefix in open_snapshot(store)[0].prefixes]


@pytest.mark.parametrize("is_early", [True, False])
def test_what_is_stored_is_in_the_pool_whichever_of_them_is_there_first(store, is_early):
    there, here = Pool(), Pool()
    first, second = (there.pool.chain(tokens_of(number, 3), salt="") for number in (1, 2))
    write(store, there.identity, {"first": first, "second": second})
    service = Service(store.url)
    if is_early:
        service.attach(here.pool, model=MODEL)
        service.fetch()
    else:
        service.fetch()
        service.attach(here.pool, model=MODEL)
    here.check(first)
    here.check(second)
    figures = service.statistics()
    assert (figures["prefixes"], figures["loaded_blocks"], figures["refused_total"]) == (2, 6, 0)
    here.prefixes.make_room(12)
    here.check(first)  # the one of more worth is given up last
    assert len(here.prefixes.find(second)) == 1


def test_a_missing_snapshot_is_no_trouble(tmp_path):
    service = Service(tmp_path / "none").fetch()
    service.attach(Pool().pool, model=MODEL)
    assert service.marks() == ["no KV snapshot"]
    assert service.statistics()["failures_total"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "ab" * 32),
        ("dtype", "float16"),
        ("epoch", "draft"),
        ("layout", "x"),
        ("block_size", 8),
        ("seed", "cd" * 32),
    ],
)
def test_a_snapshot_of_something_else_is_not_used_and_says_why(store, caplog, field, value):
    there, here = Pool(), Pool()
    write(store, replace(there.identity, **{field: value}), {"a": there.pool.chain(tokens_of(1, 3), salt="")})
    service = Service(store.url).fetch()
    service.attach(here.pool, model=MODEL)
    assert here.allocator.free_count == 16
    assert service.statistics()["refused_total"] == 1
    assert "KV snapshot refused" in service.marks()
    assert str(value) in caplog.text
    assert field.replace("_", " ") in caplog.text


def test_a_model_with_recurrent_states_has_none(store, caplog):
    shape = PoolShape(2, 2, 8, 16, BLOCK_SIZE, DType.BF16, state_size=4, num_states=2)
    service = Service(store.url).fetch()
    service.attach(Pool(storage=KVStorage(shape)).pool, model=MODEL)
    assert service.statistics()["refused_total"] == 1
    assert "recurrent states" in caplog.text


def test_plain_safetensors_have_none(store, caplog):
    service = Service(store.url)
    service.attach(Pool().pool, model=None)
    assert "pack the model" in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 5])
def test_a_damaged_part_costs_what_it_holds_and_a_warning(store, caplog, num_bytes):
    there, here = Pool(), Pool()
    first, second = (there.pool.chain(tokens_of(number, 3), salt="") for number in (1, 2))
    write(store, there.identity, {"first": first})
    snapshot = write(store, there.identity, {"first": first, "second": second})
    with open(f"{store.url}/{snapshot.blobs[1].name}", "r+b") as file:
        file.seek(num_bytes)
        file.write(b"\xee\xee")
    service = Service(store.url).fetch()
    service.attach(here.pool, model=MODEL)
    here.check(first)
    assert here.prefixes.find(second) == []
    assert "wrong digest" in caplog.text
    assert service.statistics()["failures_total"] == 1


def test_no_more_is_fetched_than_the_limit_allows(store):
    there, here = Pool(), Pool()
    first, second = (there.pool.chain(tokens_of(number, 3), salt="") for number in (1, 2))
    write(store, there.identity, {"first": first, "second": second})
    service = Service(store.url, limit_bytes=4 * there.pool.block_bytes).fetch()
    service.attach(here.pool, model=MODEL)
    here.check(first)
    assert here.prefixes.find(second) == []


def test_a_pool_without_room_takes_what_it_can(store):
    there, here = Pool(), Pool(4)
    chain = there.pool.chain(tokens_of(1, 6), salt="")
    write(store, there.identity, {"a": chain})
    service = Service(store.url).fetch()
    service.attach(here.pool, model=MODEL)
    here.check(chain[:4])


def test_a_pinned_snapshot_must_be_that_one_and_is_never_replaced(store, caplog):
    pool = Pool()
    chain = pool.pool.chain(tokens_of(1, 3), salt="")
    digest = write(store, pool.identity, {"a": chain}).digest
    service = Service(f"{store.url}@b3:{digest.hex()}").fetch()
    service.attach(pool.pool, model=MODEL)
    pool.check(chain)
    pool.compute(tokens_of(2, 2), hits=3)
    assert not service.save(WAIT_S)
    Service(f"{store.url}@b3:{bytes(32).hex()}").fetch()
    assert "pinned" in caplog.text


def test_an_instance_that_fails_to_open_fetches_nothing(store):
    opened = Future()
    opened.set_exception(SourceClosedError("closed"))
    service = Service(store.url)
    service.start(opened)
    assert service.has_run.wait(WAIT_S)
    assert service.marks() == []


# Saving


def ready(store, *, num_blocks=16, **options):
    """A service over a pool of its own."""
    pool = Pool(num_blocks)
    service = Service(store.url, **options).fetch()
    service.attach(pool.pool, model=MODEL)
    return service, pool


def test_what_was_of_use_is_there_for_the_next_one(store):
    service, pool = ready(store)
    system = pool.compute(tokens_of(1, 3), hits=2)
    once = pool.compute(tokens_of(2, 3))
    assert service.save(WAIT_S)
    _, another = ready(store)
    another.check(system)
    assert another.prefixes.find(once) == []
    assert prefix_names(store) == ["recent-1"]


def test_where_nothing_was_of_use_nothing_is_saved(store):
    service, pool = ready(store)
    pool.compute(tokens_of(1, 3))
    assert not service.save(WAIT_S)
    with pytest.raises(NotFoundError):
        open_snapshot(store)


def test_nothing_is_written_where_nothing_is_new(store):
    service, pool = ready(store)
    pool.compute(tokens_of(1, 3), hits=1)
    assert service.save(WAIT_S)
    _, version = open_snapshot(store)
    assert not service.save(WAIT_S)
    assert open_snapshot(store)[1] == version


def test_saving_can_be_turned_off(store):
    service, pool = ready(store, saves=False)
    pool.compute(tokens_of(1, 3), hits=1)
    assert not service.save(WAIT_S)


def test_what_somebody_exported_is_kept(store):
    chain = Pool().pool.chain(tokens_of(7, 2), salt="")
    write(store, Pool().identity, {"system": chain})
    service, pool = ready(store)
    other = pool.compute(tokens_of(1, 3), hits=1)
    assert service.save(WAIT_S)
    assert prefix_names(store) == ["system", "recent-1"]
    _, another = ready(store)
    another.check(chain)
    another.check(other)


def test_of_two_servers_that_end_at_once_both_are_heard(store):
    services = [ready(store) for _ in range(2)]
    chains = [pool.compute(tokens_of(number, 3), hits=1) for number, (_, pool) in enumerate(services)]
    threads = [threading.Thread(target=service.save, args=(WAIT_S,)) for service, _ in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(prefix_names(store)) == ["recent-1", "recent-2"]
    _, another = ready(store)
    for chain in chains:
        another.check(chain)


def test_a_server_that_runs_out_of_time_leaves_the_old_one_whole(store, monkeypatch):
    service, pool = ready(store)
    first = pool.compute(tokens_of(1, 3), hits=1)
    assert service.save(WAIT_S)
    pool.compute(tokens_of(2, 3), hits=5)
    written, go_on, has_ended = threading.Event(), threading.Event(), threading.Event()

    def slow_get(hashes):
        written.set()
        assert go_on.wait(WAIT_S)
        return type(pool.pool).get(pool.pool, hashes)

    monkeypatch.setattr(pool.pool, "get", slow_get)
    after_save(service, has_ended.set)
    assert not service.save(0.2)
    assert written.is_set()
    before = open_snapshot(store)[1]
    go_on.set()
    assert has_ended.wait(WAIT_S)
    assert open_snapshot(store)[1] == before
    assert prefix_names(store) == ["recent-1"]
    assert len(list(FileStore(store.url).list("kv/"))) == 1
    _, another = ready(store)
    another.check(first)


def test_another_models_exported_snapshot_is_left_alone(store, caplog):
    chain = Pool().pool.chain(tokens_of(7, 2), salt="")
    write(store, replace(Pool().identity, model="ab" * 32), {"system": chain})
    service, pool = ready(store)
    pool.compute(tokens_of(1, 3), hits=1)
    before = open_snapshot(store)[1]
    assert not service.save(WAIT_S)
    assert open_snapshot(store)[1] == before
    assert "was not saved" in caplog.text


def test_what_another_models_servers_left_gives_way(store):
    chain = Pool().pool.chain(tokens_of(7, 2), salt="")
    write(store, replace(Pool().identity, model="ab" * 32), {"recent-1": chain})
    service, pool = ready(store)
    mine = pool.compute(tokens_of(1, 3), hits=1)
    assert service.save(WAIT_S)
    _, another = ready(store)
    another.check(mine)
    assert len(list(FileStore(store.url).list("kv/"))) == 1


def test_what_is_no_snapshot_is_left_alone(store, caplog):
    store.put(SNAPSHOT_NAME, b'{"format": "mine"}')
    service, pool = ready(store)
    pool.compute(tokens_of(1, 3), hits=1)
    assert not service.save(WAIT_S)
    assert store.read(SNAPSHOT_NAME, max_bytes=100)[0] == b'{"format": "mine"}'


def test_who_is_overtaken_every_time_gives_up(store, monkeypatch, caplog):
    service, pool = ready(store)
    pool.compute(tokens_of(1, 3), hits=1)
    original = pool.pool.get
    numbers = iter(range(10, 99))

    def overtaken(hashes):
        other = Pool()
        write(
            store,
            other.identity,
            {f"x{next(numbers)}": other.pool.chain(tokens_of(next(numbers), 1), salt="")},
        )
        return original(hashes)

    monkeypatch.setattr(pool.pool, "get", overtaken)
    caplog.set_level("INFO", snapshot_service.__name__)
    assert not service.save(WAIT_S)
    assert "their generations stay" in caplog.text
