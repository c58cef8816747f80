"""`snapshot.json` is what the format allows, or refused with the place that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.flipped_bits import accepted_flips, without_own_digest
from tests.support.kv_snapshots import Pool, tokens_of, write
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import FormatError, IntegrityError
from teneral.runtime.errors import SnapshotError, SnapshotMismatchError
from teneral.runtime.kv.snapshots import snapshot
from teneral.runtime.kv.snapshots.snapshot import (
    SNAPSHOT_NAME,
    dump_snapshot,
    parse_snapshot,
    require_same,
    require_same_model,
)


def stored(num_parts: int = 1) -> bytes:
    """The object of a snapshot of two prefixes that share a beginning."""
    pool = Pool()
    system = pool.pool.chain(tokens_of(1, 3), salt="")
    longer = pool.pool.chain(tokens_of(1, 3) + tokens_of(2, 2), salt="")
    store = MemoryStore()
    for number in range(num_parts):
        write(store, pool.identity, {"system": system, "longer": longer, **{f"p{number}": system[:1]}})
    return store.read(SNAPSHOT_NAME, max_bytes=1 << 20)[0]


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(without_own_digest(stored()))
    change(document)
    return json.dumps(document).encode()


def test_it_is_read_as_it_was_written():
    data = stored()
    snapshot = parse_snapshot(data, expected_digest=blake3(data).digest())
    assert dump_snapshot(snapshot) == data
    assert [prefix.name for prefix in snapshot.prefixes] == ["system", "longer", "p0"]
    assert [prefix.blocks for prefix in snapshot.prefixes] == [(0, 1, 2), (0, 1, 2, 3, 4), (0,)]
    assert len(snapshot.hashes) == 5  # what is shared is there once


def test_another_one_than_was_pinned_is_refused_before_it_is_parsed():
    with pytest.raises(IntegrityError, match="pinned"):
        parse_snapshot(b"not even JSON", expected_digest=bytes(32))


def test_every_flipped_bit_is_refused():
    assert accepted_flips(SOUND, parse_snapshot) == []


def test_one_of_an_older_writer_has_no_digest_of_itself_and_is_read():
    old, new = parse_snapshot(without_own_digest(SOUND)), parse_snapshot(SOUND)
    assert replace(old, digest=new.digest) == new


def test_a_digest_of_itself_at_another_place_is_refused():
    with pytest.raises(SnapshotError, match="does not end with it"):
        parse_snapshot(
            changed(lambda document: document.update(blake3="0" * 64, generator=document.pop("generator")))
        )


def test_no_text_and_no_salt_is_in_it():
    keys = set(json.loads(stored()))
    assert keys == {
        "format", "version", "generator", "host", "model", "dtype", "epoch", "layout", "block_size", "block_bytes",
        "element_bytes", "seed", "blobs", "parts", "prefixes", "blake3",
    }  # fmt: skip


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(document: dict[str, Any]) -> None:
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def swap_blocks(document: dict[str, Any]) -> None:
    document["prefixes"][0]["blocks"] = [1, 0, 2]


def twice(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document[key].append(document[key][0])


HOSTILE = {
    "another format": (put("format", value="teneral"), "not a Teneral KV snapshot"),
    "a newer version": (put("version", value=2), "version is 2, but only 1"),
    "a version that is true": (put("version", value=True), "version"),
    "an unknown key": (put("more", value=1), "'more' is unknown"),
    "a missing key": (lambda document: document.pop("seed"), "'seed' is missing"),
    "elements of three bytes": (put("element_bytes", value=3), "element_bytes"),
    "blocks of no bytes": (put("block_bytes", value=0), "block_bytes"),
    "huge blocks": (put("block_bytes", value=1 << 40), "block_bytes"),
    "half an element": (put("block_bytes", value=1023), "not a whole number of elements"),
    "no tokens a block": (put("block_size", value=0), "at least one token"),
    "a negative offset": (put("parts", 0, "offset", value=-8), r"parts\[0\].offset"),
    "an offset beyond the blob": (put("parts", 0, "offset", value=1 << 40), "its blob at"),
    "a size that the planes do not have": (put("parts", 0, "size", value=8), "its planes end at"),
    "a huge size": (put("parts", 0, "size", value=1 << 50), r"parts\[0\].size"),
    "an unknown blob": (put("parts", 0, "blob", value=7), "there is no blob 7"),
    "a part twice": (twice("parts"), "before the end"),
    "a block twice in a part": (
        lambda document: put("parts", 0, "blocks", 1, value=document["parts"][0]["blocks"][0])(document),
        "duplicate block",
    ),
    "a block less than before": (
        lambda document: document["parts"][0]["blocks"].pop(),
        r"prefixes\[1\]",
    ),
    "no blocks": (put("parts", 0, "blocks", value=[]), "holds no blocks"),
    "a hash that is none": (put("parts", 0, "blocks", 0, value="00"), "hexadecimal"),
    "a plane too few": (lambda document: document["parts"][0]["planes"].pop(), "1 planes for elements of 2"),
    "a plane elsewhere": (put("parts", 0, "planes", 0, 1, value=8), "not behind the one before"),
    "an unknown codec": (put("parts", 0, "planes", 0, 0, value="lzma"), "codec"),
    "a plane that is none": (put("parts", 0, "planes", 0, value=7), "a plane is a list"),
    "a blob that leaves the folder": (put("blobs", 0, "name", value="kv/../manifest.json"), "usable object name"),
    "a blob in another folder": (put("blobs", 0, "name", value="blobs/a.bin"), "does not begin with 'kv/'"),
    "a blob twice": (twice("blobs"), "duplicate name"),
    "a name twice": (twice("prefixes"), "duplicate name"),
    "a name with a path": (put("prefixes", 0, "name", value="../x"), "not a valid prefix name"),
    "a long name": (put("prefixes", 0, "name", value="x" * 200), "not a valid prefix name"),
    "a prefix without blocks": (put("prefixes", 0, "blocks", value=[]), "at least one"),
    "blocks that descend": (swap_blocks, "ascending"),
    "a block that there is not": (put("prefixes", 0, "blocks", 2, value=99), r"integer from 0 to 4"),
    "a negative block": (put("prefixes", 0, "blocks", 0, value=-1), "integer from 0"),
    "tokens that are not those of the blocks": (put("prefixes", 0, "tokens", value=11), "do not hold 11 tokens"),
    "a block behind two others": (put("prefixes", 2, "blocks", value=[1]), "follows another block"),
    "host values that are no texts": (put("host", value={"cpu": 1}), "host"),
    "a float": (put("block_size", value=4.0), "not an integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_format_does_not_allow_is_refused_by_its_place(name):
    change, expected = HOSTILE[name]
    with pytest.raises(SnapshotError, match=expected) as refused:
        parse_snapshot(changed(change))
    assert refused.value.hint


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b'{"format": 1, "format": 1}', b"[" * 100_000, b"9" * 10_000]
)
def test_what_is_no_object_is_refused(data):
    with pytest.raises(SnapshotError, match=r"snapshot\.json"):
        parse_snapshot(data)


def test_counts_and_sizes_are_bounded(monkeypatch):
    with pytest.raises(SnapshotError, match="more than"):
        parse_snapshot(b" " * (snapshot.MAX_SNAPSHOT_JSON_BYTES + 1))
    with pytest.raises(SnapshotError, match="items"):
        parse_snapshot(b"[" + b"0," * snapshot.MAX_JSON_ITEMS + b"0]")
    monkeypatch.setattr(snapshot, "MAX_BLOCKS", 4)
    with pytest.raises(SnapshotError, match="more than 4 blocks"):
        parse_snapshot(stored())


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_noise_in_a_sound_one_is_refused_or_harmless(data):
    sound = without_own_digest(SOUND)
    place = data.draw(st.integers(0, len(sound) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=4))
    try:
        snapshot = parse_snapshot(sound[:place] + noise + sound[place + len(noise) :])
    except FormatError:
        return
    assert all(len(prefix.blocks) <= len(snapshot.hashes) for prefix in snapshot.prefixes)


SOUND = stored()

DIFFERENCES = {
    "model": "ab" * 32,
    "dtype": "float16",
    "epoch": "draft",
    "layout": "bfloat16[3, 2, 2, 4, 8]",
    "block_size": 32,
    "block_bytes": 64,
    "element_bytes": 4,
    "seed": "cd" * 32,
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_what_was_made_for_something_else_is_refused_by_its_name_with_both_values(field):
    here = Pool().identity
    theirs = replace(here, **{field: DIFFERENCES[field]})
    with pytest.raises(SnapshotMismatchError) as refused:
        require_same(theirs, here, where="s3://b/kv")
    assert field.replace("_", " ") in refused.value.message
    assert str(DIFFERENCES[field]) in refused.value.message
    assert str(getattr(here, field)) in refused.value.message
    assert refused.value.where == field.replace("_", " ")
    require_same(here, here, where="s3://b/kv")


def test_all_that_differs_is_named():
    here = Pool().identity
    with pytest.raises(SnapshotMismatchError, match=r"its dtype is .*; its block size is"):
        require_same(replace(here, dtype="float32", block_size=8), here, where="x")


def test_another_model_is_refused_as_soon_as_it_is_known():
    with pytest.raises(SnapshotMismatchError, match="another model"):
        require_same_model(Pool().identity, "00" * 32, where="x")
