"""Model directories whose parts lie about each other. Each is refused with an error that names the liar."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.checkpoints import (
    index_file,
    llama_contents,
    model_objects,
    random_content,
    safetensors_file,
)
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import ChangedError, CheckpointError, FormatError
from teneral.loader.format import checkpoint_files
from teneral.loader.format.checkpoint import open_checkpoint
from teneral.loader.format.checkpoint_files import parse_index
from teneral.loader.sources.file.store import FileStore

INDEX = "model.safetensors.index.json"
ONE = safetensors_file({"a": random_content("U8", (4,))})
TWO = safetensors_file({"b": random_content("U8", (4,))})


def refuse(objects: dict[str, bytes], match: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(MemoryStore(objects))
    return caught.value


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "/etc/secret.safetensors",
        "a/../../b.safetensors",
        "sub/one.safetensors",
        "..",
        "",
        ".safetensors/..",
        "s3://bucket/one.safetensors",
        "one.safetensors\x00",
        "one\n.safetensors",
        "..\\one.safetensors",
        "weights.bin",
        "x" * 2000 + ".safetensors",
        None,
        3,
        ["one.safetensors"],
        {"name": "one.safetensors"},
    ],
)
def test_an_index_that_points_elsewhere_is_refused(shard: Any) -> None:
    error = refuse({INDEX: index_file({"a": shard})}, "not a safetensors file of this folder")
    assert error.where == INDEX


def test_an_index_cannot_reach_a_file_outside_through_the_file_system(tmp_path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(ONE)
    model = tmp_path / "model"
    model.mkdir()
    (model / INDEX).write_bytes(index_file({"a": "../outside.safetensors"}))
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        open_checkpoint(FileStore(model))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"weight_map": []}',
        b'{"weight_map": null}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "one.safetensors"}',
        b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}',
        b'{"weight_map": {}, "weight_map": {"a": "one.safetensors"}}',
        b'{"weight_map": ' + b'{"a":' * 50_000,
        b"\xff\xfe{}",
    ],
)
def test_an_index_that_is_no_index_is_refused(index: bytes) -> None:
    assert refuse({INDEX: index, "one.safetensors": ONE}, INDEX).where == INDEX


def test_an_index_of_too_many_bytes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_INDEX_BYTES", 100)
    with pytest.raises(FormatError, match="101 bytes"):
        open_checkpoint(MemoryStore({INDEX: b" " * 101}))


def test_an_index_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(CheckpointError, match="more than the 250000 tensors"):
        parse_index(b'{"weight_map": {' + b'"a":"b",' * 2_000_001, where=INDEX)


def test_an_index_of_too_many_shards_is_refused() -> None:
    weight_map = {f"t{number}": f"{number}.safetensors" for number in range(5000)}
    with pytest.raises(CheckpointError, match="more than 4096 shards"):
        parse_index(index_file(weight_map), where=INDEX)


def test_missing_shards_are_counted_and_named() -> None:
    index = index_file({"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"})
    error = refuse({INDEX: index, "one.safetensors": ONE}, "2 of 3 files named in")
    assert "three.safetensors, two.safetensors" in error.message
    assert "incomplete" in error.hint


def test_a_tensor_that_is_listed_but_absent_is_named() -> None:
    index = index_file({"a": "one.safetensors", "ghost": "one.safetensors"})
    refuse({INDEX: index, "one.safetensors": ONE}, "tensor 'ghost' is in one.safetensors, but it is not")


def test_a_tensor_that_is_in_another_shard_than_listed_is_named() -> None:
    index = index_file({"a": "two.safetensors", "b": "one.safetensors"})
    refuse({INDEX: index, "one.safetensors": ONE, "two.safetensors": TWO}, "tensor 'a' is in two.safetensors")


def test_a_tensor_in_two_shards_is_named_with_both() -> None:
    index = index_file({"a": "one.safetensors", "b": "two.safetensors"})
    both = safetensors_file({"a": random_content("U8", (4,)), "b": random_content("U8", (4,))})
    refuse(
        {INDEX: index, "one.safetensors": ONE, "two.safetensors": both},
        "tensor a is both in one.safetensors and in two.safetensors",
    )


def test_two_models_in_one_folder_are_refused() -> None:
    refuse({"ema.safetensors": ONE, "main.safetensors": ONE}, "tensor a is both in")
    indices = {f"{name}.safetensors.index.json": index_file({"a": "x.safetensors"}) for name in ("a", "b")}
    refuse(indices, "holds several models")


@pytest.mark.parametrize("cut_bytes", [1, 100, 5000])
def test_a_shard_that_was_cut_off_is_named(cut_bytes: int) -> None:
    objects = model_objects(llama_contents(), num_shards=2)
    name = "model-00002-of-00002.safetensors"
    objects[name] = objects[name][:-cut_bytes]
    error = refuse(objects, "but the file has only")
    assert error.where == name


def test_a_small_file_of_absurd_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_SMALL_FILE_BYTES", 10)
    refuse(
        {"model.safetensors": ONE, "tokenizer.json": bytes(11)}, "tokenizer.json has 11 bytes, of 10 allowed"
    )


def test_a_folder_of_very_many_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_LISTED", 3)
    refuse({f"{number}.txt": b"" for number in range(4)}, "more than 3 objects")


def test_a_shard_that_is_replaced_after_its_listing_is_refused() -> None:
    class Swapped(MemoryStore):
        def list(self, prefix: str = ""):
            listed = list(super().list(prefix))
            self.put("model.safetensors", TWO)
            return iter(listed)

    with pytest.raises(ChangedError, match=r"model\.safetensors"):
        open_checkpoint(Swapped({"model.safetensors": ONE}))
