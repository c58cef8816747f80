"""Packing: what is written, in which order, with how much in work, and that failures leave nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.support.artifacts import names_in
from tests.support.checkpoints import (
    SMALL_FILES,
    Contents,
    llama_contents,
    model_objects,
    model_store,
    random_content,
)
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore, MemoryWriter

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.errors import (
    AlreadyExistsError,
    CheckpointError,
    UsageError,
)
from teneral.loader.format import layout
from teneral.loader.format.checkpoint import open_checkpoint
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.format.manifest_json import dump_manifest
from teneral.loader.format.tensor_digests import FILE_NAME as DIGESTS_NAME
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions, find_aliases
from teneral.loader.tools.pack.write import BlobWriter
from teneral.loader.tools.verify import verify


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts parts so small that a tiny model has many."""
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)


def test_an_artifact_holds_a_manifest_blobs_of_both_tiers_and_the_small_files() -> None:
    store = MemoryStore()
    result = pack(model_store(llama_contents()), store)
    folders = {name.rpartition("/")[0] for name in names_in(store)}
    (generation,) = {name.split("/")[1] for name in names_in(store) if name.startswith("blobs/")}
    assert len(generation) == 12
    assert names_in(store) == sorted(
        [
            "manifest.json",
            f"blobs/{generation}/draft-000.bin",
            f"blobs/{generation}/refine-000.bin",
            *(f"blobs/{generation}/files/{name}" for name in (*SMALL_FILES, DIGESTS_NAME)),
        ]
    )
    assert len(folders) == 4
    assert open_artifact(store) == result.manifest
    assert result.stored_bytes == sum(info.size_bytes for info in store.list())


def test_small_files_come_back_by_their_names() -> None:
    store = MemoryStore()
    manifest = pack(model_store(llama_contents()), store).manifest
    files = {file.name: read_file(store, manifest, file.name) for file in manifest.files}
    assert files.pop(DIGESTS_NAME)
    assert files == SMALL_FILES


def test_draft_parts_stand_before_refine_parts_and_both_in_forward_order(small_parts: None) -> None:
    manifest = pack(model_store(llama_contents(hidden=256)), MemoryStore()).manifest
    tiers = [part.tier for part in manifest.parts]
    assert tiers == sorted(tiers)
    for tier in (Tier.DRAFT, Tier.REFINE):
        groups = [part.group for part in manifest.parts if part.tier is tier]
        assert groups == sorted(groups)
        assert len(groups) > len(set(groups))
    assert [group.name for group in manifest.groups] == ["embed", "layers.0", "layers.1", "head"]


def test_bf16_matrices_are_split_and_their_draft_takes_two_fifths() -> None:
    manifest = pack(model_store(llama_contents(hidden=256, vocabulary=500)), MemoryStore()).manifest
    by_encoding = {tensor.encoding.value: tensor.name for tensor in manifest.tensors}
    assert set(by_encoding) == {"bf16.3", "bf16.5", "whole"}
    assert "norm" in by_encoding["whole"]
    assert 0.38 < manifest.stored_bytes(Tier.DRAFT) / manifest.weight_bytes < 0.45
    assert 0.22 < manifest.stored_bytes(Tier.REFINE) / manifest.weight_bytes < 0.25


def test_what_is_packed_is_intact(small_parts: None) -> None:
    store = MemoryStore()
    pack(model_store(llama_contents(hidden=256)), store)
    assert verify(store).ok


def test_the_number_of_threads_does_not_change_what_is_written(small_parts: None) -> None:
    source = model_store(llama_contents(hidden=128))
    stored = []
    for threads in (1, 3):
        store = MemoryStore()
        pack(source, store, threads=threads)
        blobs = [info.name for info in store.list("blobs/")]
        stored.append([store.read(name, max_bytes=1 << 30)[0] for name in blobs])
    assert stored[0] == stored[1]


def test_packing_again_gives_the_same_digest_under_other_names(small_parts: None) -> None:
    """Also to another place, by other threads: pins, the identities of batch jobs and node caches rest on it."""
    stores = [MemoryStore(label="first"), MemoryStore(label="second")]
    first, second = (
        pack(model_store(llama_contents()), store, threads=threads)
        for threads, store in enumerate(stores, start=1)
    )
    assert first.manifest.digest == second.manifest.digest
    assert open_artifact(stores[1], digest=first.manifest.digest).digest == first.manifest.digest
    folders = [{blob.name.rpartition("/")[0] for blob in each.manifest.blobs} for each in (first, second)]
    assert folders[0].isdisjoint(folders[1]), "writers never share a folder"
    third = pack(model_store(llama_contents()), stores[0], force=True)
    assert third.manifest.digest == first.manifest.digest
    assert not verify(stores[0]).problems


@pytest.mark.parametrize("tiers", [TierOptions(draft_bits=2), TierOptions(sketch_bits=1)])
def test_other_options_give_another_digest(small_parts: None, tiers: TierOptions) -> None:
    plain, other = (
        pack(model_store(llama_contents()), MemoryStore(), tiers=each).manifest.digest
        for each in (None, tiers)
    )
    assert plain != other


def test_a_model_without_a_config_packs() -> None:
    store = MemoryStore()
    pack(MemoryStore({"w.safetensors": model_objects(llama_contents())["model.safetensors"]}), store)
    assert verify(store).ok
    assert [file.name for file in open_artifact(store).files] == [DIGESTS_NAME]


def test_a_model_without_any_elements_packs() -> None:
    store = MemoryStore()
    result = pack(model_store({"e": random_content("F32", (0, 3))}), store)
    assert result.manifest.parts == ()
    assert result.manifest.blobs == ()
    assert open_artifact(store).by_name["e"].shape == (0, 3)


def test_progress_rises_to_the_whole(small_parts: None) -> None:
    contents = llama_contents(hidden=128)
    seen: list[tuple[int, int]] = []
    pack(
        model_store(contents),
        MemoryStore(),
        progress=lambda progress: seen.append((progress.done_bytes, progress.total_bytes)),
    )
    total = sum(len(data) for _, _, data in contents.values())
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_the_result_can_be_pinned_and_shown() -> None:
    store = MemoryStore(label="models")
    result = pack(model_store(llama_contents()), store)
    assert result.manifest.digest is not None
    assert f"memory://models@b3:{result.manifest.digest.hex()}" in result.render()
    assert open_artifact(store, digest=result.manifest.digest) == result.manifest


def test_no_more_parts_are_in_work_than_threads_and_one(small_parts: None) -> None:
    """While nothing can be written, the readers stop after as many parts as there are buffers."""
    is_writable = threading.Event()
    read: set[str] = set()

    class Slow(MemoryStore):
        def create(self, name: str) -> MemoryWriter:
            is_writable.wait(patience_s(60))
            return super().create(name)

    class Watched(MemoryStore):
        def read_into(self, name: str, start: int, buffer: memoryview, *, version: str | None = None) -> None:
            super().read_into(name, start, buffer, version=version)
            if start and len(buffer) == 2 * FRAME_ELEMENTS:  # a tensor, not the header
                read.add(f"{name} {start}")

    contents = {f"layers.{number}.w": random_content("BF16", (256, 256), number) for number in range(12)}
    source = Watched(model_objects(contents))
    packing = threading.Thread(target=pack, args=(source, Slow()), kwargs={"threads": 2, "sparse": False})
    packing.start()
    for _ in range(1000):
        if len(read) >= 3:
            break
        is_writable.wait(0.01)
    is_writable.wait(0.2)  # time in which a fourth part could be read, were it allowed
    num_read_ahead = len(read)
    is_writable.set()
    packing.join(patience_s(60))
    assert num_read_ahead == 3
    assert len(read) == 12


# -- tied tensors


def test_tied_embeddings_are_stored_once() -> None:
    contents = llama_contents(tied=True)
    manifest = pack(model_store(contents), MemoryStore()).manifest
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert len(manifest.tensors) == len(contents) - 1
    assert manifest.by_name["lm_head.weight"] is manifest.by_name["model.embed_tokens.weight"]


def test_embeddings_that_differ_in_their_last_byte_are_not_tied() -> None:
    contents = llama_contents(tied=True, vocabulary=5000)
    dtype, shape, data = contents["lm_head.weight"]
    contents["lm_head.weight"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))
    assert pack(model_store(contents), MemoryStore()).manifest.aliases == {}


def test_equal_bytes_of_another_dtype_or_shape_are_not_tied() -> None:
    data = bytes(48)
    contents: Contents = {"a": ("F16", (4, 6), data), "b": ("I16", (4, 6), data), "c": ("F16", (6, 4), data)}
    assert pack(model_store(contents), MemoryStore()).manifest.aliases == {}


def test_all_four_embeddings_of_an_encoder_decoder_model_become_one() -> None:
    shared = random_content("F32", (50, 8))
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    source = model_store(dict.fromkeys(names, shared))
    manifest = pack(source, MemoryStore()).manifest
    assert len(manifest.tensors) == 1
    assert {*manifest.aliases, manifest.tensors[0].name} == set(names)


def test_shapes_that_every_layer_has_are_not_compared() -> None:
    contents = {f"layers.{number}.w": random_content("F32", (8, 8)) for number in range(5)}
    source = model_store(contents)
    assert find_aliases(source, open_checkpoint(source), list(contents)) == {}


# -- destinations


def test_an_artifact_is_not_replaced_without_force() -> None:
    source, store = model_store(llama_contents()), MemoryStore()
    pack(source, store)
    before = names_in(store)
    with pytest.raises(AlreadyExistsError, match="an artifact at memory") as caught:
        pack(source, store)
    assert "--force" in caught.value.hint
    assert names_in(store) == before


def test_force_replaces_an_artifact_and_keeps_its_objects_for_loads_under_way() -> None:
    store = MemoryStore()
    old = pack(model_store(llama_contents(num_layers=1)), store).manifest
    before = set(names_in(store))
    result = pack(model_store(llama_contents(num_layers=2)), store, force=True)
    assert open_artifact(store) == result.manifest
    assert before < set(names_in(store))
    assert [each.name for each in result.unused] == [old.generation]
    assert "`teneral gc memory://" in result.render()
    assert verify(store).ok


def test_force_on_an_empty_place_just_packs() -> None:
    store = MemoryStore()
    pack(model_store(llama_contents()), store, force=True)
    assert verify(store).ok


def test_force_replaces_an_unreadable_manifest() -> None:
    store = MemoryStore({"manifest.json": b"not a manifest"})
    pack(model_store(llama_contents()), store, force=True)
    assert verify(store).ok


def test_force_removes_nothing_but_blobs_whatever_the_old_manifest_names() -> None:
    store = MemoryStore({"precious.txt": b"keep me"})
    manifest = pack(model_store(llama_contents()), store).manifest
    file = manifest.files[0]
    precious = file._replace(path="precious.txt", size_bytes=7)
    hostile = manifest._replace(files=(precious,), digest=None, generation="")
    store.put("manifest.json", dump_manifest(hostile))
    pack(model_store(llama_contents()), store, force=True)
    assert store.read("precious.txt", max_bytes=100)[0] == b"keep me"


def test_a_model_can_be_packed_into_its_own_folder_but_only_once(tmp_path: Path) -> None:
    for name, data in model_objects(llama_contents()).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    folder = FileStore(tmp_path)
    pack(folder, folder)
    assert verify(folder).ok
    assert (tmp_path / "model.safetensors").exists()
    for force in (False, True):
        with pytest.raises(UsageError, match="is an artifact already"):
            pack(folder, folder, force=force)


def test_an_artifact_is_refused_as_a_source() -> None:
    artifact = MemoryStore()
    pack(model_store(llama_contents()), artifact)
    with pytest.raises(UsageError, match="is an artifact already") as caught:
        pack(artifact, MemoryStore())
    assert "original model" in caught.value.hint


def test_a_damaged_model_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    with pytest.raises(CheckpointError):
        pack(MemoryStore({"model.safetensors": b"nonsense"}), store)
    assert names_in(store) == []


def test_packing_without_threads_is_refused() -> None:
    with pytest.raises(UsageError, match="0 threads"):
        pack(model_store(llama_contents()), MemoryStore(), threads=0)


# -- blobs


def test_blobs_are_rolled_before_they_grow_too_large() -> None:
    store = MemoryStore()
    writer = BlobWriter(store, max_blob_bytes=100)
    placed = [writer.append(Tier.DRAFT, [bytes([number]) * 40], 40) for number in range(5)]
    placed.append(writer.append(Tier.REFINE, [b"r" * 30, b"s" * 10], 40))
    blobs = writer.finish()
    assert placed == [(0, 0), (0, 40), (1, 0), (1, 40), (2, 0), (3, 0)]
    assert [(blob.name.rpartition("/")[2], blob.size_bytes) for blob in blobs] == [
        ("draft-000.bin", 80),
        ("draft-001.bin", 80),
        ("draft-002.bin", 40),
        ("refine-000.bin", 40),
    ]
    assert store.read(blobs[3].name, max_bytes=100)[0] == b"r" * 30 + b"s" * 10


def test_a_part_larger_than_a_blob_may_be_gets_one_of_its_own() -> None:
    writer = BlobWriter(MemoryStore(), max_blob_bytes=10)
    assert [writer.append(Tier.DRAFT, [bytes(50)], 50) for _ in range(2)] == [(0, 0), (1, 0)]
