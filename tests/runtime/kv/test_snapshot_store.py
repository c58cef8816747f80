"""A stored snapshot is whole or refused, and written as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from msgspec.structs import replace
from tests.support.aws_environment import use_test_credentials
from tests.support.flipped_bits import without_own_digest
from tests.support.kv_snapshots import MODEL, Pool, Service, contents_of, tokens_of, write
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    SourceError,
    UnavailableError,
)
from teneral.loader.sources.base import SourceOptions, Store
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.s3.store import S3Store
from teneral.runtime.kv.snapshots.parts import SnapshotReader, decode_blocks, open_snapshot, place_part
from teneral.runtime.kv.snapshots.snapshot import SNAPSHOT_NAME, Identity, check_layout
from teneral.runtime.kv.snapshots.tools import copy_snapshot, describe, render_table, verify_snapshot
from teneral.runtime.kv.snapshots.writer import NamedChain, SnapshotWriter, find_published, write_generation
from teneral.runtime.kv.storage import Int8KVStorage, KVLayers, KVStorage, PoolShape
from teneral.runtime.tensors import DType

POOL = Pool()
IDENTITY = POOL.identity
LAYOUT = IDENTITY.layout
FIRST = POOL.pool.chain(tokens_of(1, 3), salt="")
LONGER = POOL.pool.chain(tokens_of(1, 3) + tokens_of(2, 2), salt="")
OTHER = POOL.pool.chain(tokens_of(3, 2), salt="")


def contents(store: Store) -> dict[bytes, bytes]:
    """Every block that is stored, by what it is known by."""
    snapshot, _ = open_snapshot(store)
    reader = SnapshotReader(store, snapshot)
    return {
        each: row.tobytes()
        for part in snapshot.parts
        for each, row in zip(part.hashes, reader.read(part), strict=True)
    }


def expected(*chains: tuple[bytes, ...]) -> dict[bytes, bytes]:
    return {
        each: contents_of([each], IDENTITY.block_bytes)[0].tobytes() for chain in chains for each in chain
    }


def blob_names(store: Store) -> list[str]:
    return [info.name for info in store.list("kv/")]


@pytest.fixture
def store(tmp_path) -> FileStore:
    return FileStore(tmp_path / "kv snapshot")


def test_blocks_come_back_as_they_were_stored(store):
    snapshot = write(store, IDENTITY, {"first": FIRST, "other": OTHER})
    assert contents(store) == expected(FIRST, OTHER)
    assert sum(part.size_bytes for part in snapshot.parts) < len(snapshot.hashes) * IDENTITY.block_bytes


@pytest.mark.parametrize("dtype_bytes", [1, 2, 4])
def test_noise_is_stored_as_it_is(store, dtype_bytes):
    identity = replace(IDENTITY, element_bytes=dtype_bytes)
    noise = np.random.default_rng(0).integers(0, 256, (3, identity.block_bytes), np.uint8)
    write_generation(store, identity, [NamedChain("a", FIRST)], lambda hashes: noise, replaced=None)
    assert list(contents(store).values()) == [row.tobytes() for row in noise]


def test_a_later_generation_goes_on_with_the_parts_of_the_one_before(store):
    write(store, IDENTITY, {"first": FIRST})
    (old,) = blob_names(store)
    before = store.stat(old)
    snapshot = write(store, IDENTITY, {"first": FIRST, "longer": LONGER})
    assert contents(store) == expected(LONGER)
    assert store.stat(old) == before
    assert [len(part.hashes) for part in snapshot.parts] == [3, 2]
    assert [prefix.blocks for prefix in snapshot.prefixes] == [(0, 1, 2), (0, 1, 2, 3, 4)]


def test_blobs_that_no_generation_names_any_more_are_removed(store):
    write(store, IDENTITY, {"first": FIRST})
    (old,) = blob_names(store)
    write(store, IDENTITY, {"other": OTHER})
    assert old not in blob_names(store)
    assert contents(store) == expected(OTHER)


def test_of_two_that_write_at_once_one_wins_and_the_other_leaves_nothing(store):
    replaced = find_published(store)
    writers = [SnapshotWriter(store, IDENTITY, replaced=replaced) for _ in range(2)]
    for writer, chain in zip(writers, (FIRST, OTHER), strict=True):
        writer.add(chain, contents_of(chain, IDENTITY.block_bytes))
    writers[1].publish([NamedChain("other", OTHER)])
    with pytest.raises(AlreadyExistsError):
        writers[0].publish([NamedChain("first", FIRST)])
    assert contents(store) == expected(OTHER)
    assert len(blob_names(store)) == 1


def test_who_replaces_what_is_not_there_any_more_loses(store):
    write(store, IDENTITY, {"first": FIRST})
    replaced = find_published(store)
    write(store, IDENTITY, {"first": FIRST, "longer": LONGER})
    writer = SnapshotWriter(store, IDENTITY, replaced=replaced)
    writer.add(OTHER, contents_of(OTHER, IDENTITY.block_bytes))
    with pytest.raises(AlreadyExistsError):
        writer.publish([NamedChain("other", OTHER)])
    assert contents(store) == expected(LONGER)


def test_without_time_left_the_old_one_stays_whole(store):
    write(store, IDENTITY, {"first": FIRST})
    before = blob_names(store)
    for asked_times in (0, 1):
        answers = iter([True] * asked_times + [False] * 9)
        with pytest.raises(TimeoutError):
            write_generation(
                store,
                IDENTITY,
                [NamedChain("other", OTHER)],
                lambda hashes: contents_of(hashes, IDENTITY.block_bytes),
                replaced=find_published(store),
                is_time_left=lambda answers=answers: next(answers),
            )
        assert contents(store) == expected(FIRST)
        assert blob_names(store) == before


def test_what_cannot_be_read_of_a_chain_is_cut_off(store):
    def read(hashes):
        return contents_of(hashes, IDENTITY.block_bytes)[:1]

    write_generation(store, IDENTITY, [NamedChain("a", FIRST), NamedChain("b", OTHER)], read, replaced=None)
    snapshot, _ = open_snapshot(store)
    assert [len(prefix.blocks) for prefix in snapshot.prefixes] == [1, 1]
    assert contents(store) == expected(FIRST[:1], OTHER[:1])


class LosesAnswers(MemoryStore):
    """Takes what makes a snapshot exist, and does not say so."""

    def put(self, name, *args, **options):
        info = super().put(name, *args, **options)
        if name == SNAPSHOT_NAME:
            raise UnavailableError("no answer")
        return info


def test_a_lost_answer_does_not_cost_the_blobs_of_what_was_published():
    store = LosesAnswers()
    write_generation(
        store,
        IDENTITY,
        [NamedChain("first", FIRST)],
        lambda hashes: contents_of(hashes, IDENTITY.block_bytes),
        replaced=None,
    )
    assert contents(store) == expected(FIRST)


@settings(deadline=None, max_examples=25)
@given(
    num_blocks=st.integers(1, 4),
    num_elements=st.integers(1, 70_000),
    element_bytes=st.sampled_from([1, 2, 4, 8]),
    high=st.sampled_from([1, 4, 256]),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_size_are_coded_without_loss(num_blocks, num_elements, element_bytes, high, seed):
    identity = replace(IDENTITY, element_bytes=element_bytes, block_bytes=num_elements * element_bytes)
    content = np.random.default_rng(seed).integers(0, high, (num_blocks, identity.block_bytes), np.uint8)
    part, data = place_part(identity, [b"x" * 32] * num_blocks, content, blob=0, end_bytes=13)
    assert part.offset_bytes == 16
    assert len(data) == 3 + part.size_bytes
    again = decode_blocks(identity, part, memoryview(data)[3:], where="here")
    np.testing.assert_array_equal(again, content)
    assert part.size_bytes <= content.size + 8 * element_bytes


# What is damaged


@pytest.fixture
def written(store) -> FileStore:
    """Two parts, in two blobs."""
    write(store, IDENTITY, {"first": FIRST})
    write(store, IDENTITY, {"first": FIRST, "other": OTHER})
    return store


def damage(store: FileStore, change) -> None:
    name = open_snapshot(store)[0].blobs[0].name
    path = f"{store.url}/{name}"
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(change(data))


def test_a_flipped_bit_is_refused_with_the_name_of_its_part(written):
    damage(written, lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:])
    snapshot, _ = open_snapshot(written)
    with pytest.raises(IntegrityError, match=rf"{snapshot.blobs[0].name}, bytes 0 to \d+ has a wrong digest"):
        contents(written)
    report = verify_snapshot(written)
    assert not report.ok
    assert len(report.problems) == 1
    assert "wrong digest" in report.render()


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"epoch":"exact"', '"epoch":"exacu"', "its epoch is 'exacu'"),
        (LAYOUT, LAYOUT.replace("[", "[1", 1), "and they have"),
        (LAYOUT, LAYOUT.replace(", 2, ", ", 3, "), "is not one that this version knows"),
        (LAYOUT, "b" + LAYOUT, "is not one that this version knows"),
        (LAYOUT, LAYOUT.replace("]", "+1]"), "is not one that this version knows"),
        (LAYOUT, f"{LAYOUT} + {LAYOUT}", "and they have"),
        (LAYOUT, f"{LAYOUT} + float32{LAYOUT[LAYOUT.index('[') :]}", "is not one that this version knows"),
        (LAYOUT, f"{LAYOUT} + ", "is not one that this version knows"),
    ],
)
def test_verify_names_fields_that_no_server_has(written, before, after, problem):
    """Of an older writer: one flipped bit there, and no server would use the snapshot again."""
    path = Path(f"{written.url}/snapshot.json")
    text = without_own_digest(path.read_bytes()).decode()
    assert before in text
    path.write_text(text.replace(before, after))
    report = verify_snapshot(written)
    assert [problem in each for each in report.problems] == [True]


@pytest.mark.parametrize("kind", [KVStorage, Int8KVStorage])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("others", [(), (KVLayers(1, 1, 16), KVLayers(2, 4, 4))])
def test_the_layouts_of_all_pools_are_known(kind, dtype, num_parts, others):
    pool = kind(PoolShape(3, 2, 8, 4, 16, dtype, num_parts, others=others))
    block_bytes = kind.block_bytes(pool.shape)
    identity = Identity("0" * 64, "x", "exact", pool.layout, 16, block_bytes, pool.element_bytes, "0" * 64)
    assert check_layout(identity) == ""
    assert "and they have" in check_layout(replace(identity, block_bytes=block_bytes + 8))


def test_a_bit_that_flips_on_the_way_is_no_damage(written):
    class Flipping:
        flips = reads = 0

        def read(self, name, *, max_bytes):
            data, info = written.read(name, max_bytes=max_bytes)
            Flipping.reads += 1
            return (data if Flipping.reads > 1 else data.replace(b"exact", b"exacu")), info

        def read_into(self, name, start, buffer, *, version=None):
            found = written.read_into(name, start, buffer, version=version)
            if not Flipping.flips:
                Flipping.flips = 1
                buffer[40] ^= 4
            return found

        def __getattr__(self, name):
            return getattr(written, name)

    assert verify_snapshot(Flipping()).ok
    assert (Flipping.flips, Flipping.reads) == (1, 2)


def test_a_truncated_blob_is_refused(written):
    damage(written, lambda data: data[:-1])
    with pytest.raises(SourceError):
        contents(written)
    report = verify_snapshot(written)
    assert any("it has" in problem for problem in report.problems)
    assert report.render().splitlines()[0].endswith("; problems: 2")


def test_a_folder_without_a_snapshot_is_named_as_such(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotFoundError, match="there is no KV snapshot at") as caught:
            open_snapshot(FileStore(folder))
        assert "snapshot.json" in caught.value.hint


def test_a_missing_blob_is_refused(written):
    written.delete(open_snapshot(written)[0].blobs[1].name)
    with pytest.raises(NotFoundError):
        contents(written)
    assert not verify_snapshot(written).ok


def test_swapped_parts_are_refused(written):
    first, second = (f"{written.url}/{blob.name}" for blob in open_snapshot(written)[0].blobs)
    with open(first, "rb") as one, open(second, "rb") as two:
        data, other = one.read(), two.read()
    size = max(len(data), len(other))
    for path, content in ((first, other), (second, data)):
        with open(path, "wb") as file:
            file.write(content.ljust(size, b"\0"))
    with pytest.raises(IntegrityError):
        contents(written)
    assert len(verify_snapshot(written).problems) >= 2


def test_a_right_digest_over_a_wrong_coding_is_refused(written):
    """The digest is the writer's own: what it covers must still decode to exactly what it says."""
    from blake3 import blake3

    document = json.loads(written.read(SNAPSHOT_NAME, max_bytes=1 << 20)[0])
    part = document["parts"][0]
    with open(f"{written.url}/{document['blobs'][0]['name']}", "r+b") as file:
        data = bytearray(file.read())
        coded = next(plane for plane in part["planes"] if plane[0] == "zstd")
        data[coded[1]] ^= 0xFF  # the magic number of the first frame
        file.seek(0)
        file.write(data)
    part["blake3"] = blake3(bytes(data[: part["size"]])).hexdigest()
    written.put(SNAPSHOT_NAME, json.dumps(document).encode())
    with pytest.raises(IntegrityError):
        contents(written)


# Tools


def test_it_is_described_and_verified(written):
    snapshot, _ = open_snapshot(written)
    description = describe(snapshot, written.url)
    assert [prefix["tokens"] for prefix in description["prefixes"]] == [12, 8]
    table = render_table(description)
    assert "first" in table
    assert f"b3:{IDENTITY.model}" in table
    report = verify_snapshot(written, digest=bytes.fromhex(description["digest"]))
    assert report.ok
    assert description["pin"] in report.render()


def test_a_copy_holds_the_same_and_what_is_there_is_replaced_only_by_force(written):
    there = MemoryStore()
    copy_snapshot(written, there)
    assert contents(there) == contents(written) == expected(FIRST, OTHER)
    assert open_snapshot(there)[0].prefixes == open_snapshot(written)[0].prefixes
    with pytest.raises(AlreadyExistsError, match="--force"):
        copy_snapshot(written, there)
    copy_snapshot(written, there, force=True)
    assert contents(there) == expected(FIRST, OTHER)


def test_nothing_is_copied_of_what_is_damaged(written):
    damage(written, lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:])
    there = MemoryStore()
    with pytest.raises(IntegrityError):
        copy_snapshot(written, there)
    assert list(there.list()) == []


# S3


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        use_test_credentials(patch)
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="models")
        client.close()
        yield f"http://{host}:{port}"
        server.stop()


def test_a_server_that_ends_leaves_its_prefixes_in_a_bucket(s3_url):
    options = SourceOptions(endpoint_url=s3_url, max_attempts=1)
    chains = []
    for number in (1, 2):
        service, pool = Service("s3://models/team/served", options), Pool()
        service.attach(pool.pool, model=MODEL)
        service.fetch()
        for chain in chains:
            pool.check(chain)
        chains.append(pool.compute(tokens_of(number, 3), hits=1))
        assert service.save(60.0)
        assert not service.save(60.0)  # nothing is new
        service.close()
    assert len(chains) == 2


def test_a_bucket_holds_generations_as_a_folder_does(s3_url):
    store = S3Store("s3://models/team/kv", SourceOptions(endpoint_url=s3_url, max_attempts=1))
    try:
        assert find_published(store) is None
        write(store, IDENTITY, {"first": FIRST})
        replaced = find_published(store)
        write(store, IDENTITY, {"first": FIRST, "other": OTHER})
        assert contents(store) == expected(FIRST, OTHER)
        late = SnapshotWriter(store, IDENTITY, replaced=replaced)
        late.add(LONGER, contents_of(LONGER, IDENTITY.block_bytes))
        with pytest.raises(AlreadyExistsError):
            late.publish([NamedChain("longer", LONGER)])
        assert contents(store) == expected(FIRST, OTHER)
        assert len(blob_names(store)) == 2
    finally:
        store.close()
