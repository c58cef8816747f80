"""Unpacking: every tensor equal bit for bit, under its own name, or nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.artifacts import build_artifact
from tests.support.checkpoints import (
    SMALL_FILES,
    Contents,
    llama_contents,
    model_objects,
    model_store,
    random_content,
    read_back,
)
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_disk import tiny_disk

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    AlreadyExistsError,
    IntegrityError,
    ManifestError,
    NoSpaceError,
    UnavailableError,
)
from teneral.loader.format import layout
from teneral.loader.format.manifest import DTYPE_BITS, FRAME_ELEMENTS, Tier
from teneral.loader.format.manifest_json import dump_manifest
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.part_reader import map_in_order
from teneral.loader.tools.unpack import plan_shards, unpack


def packed(source: MemoryStore) -> MemoryStore:
    store = MemoryStore(label="artifact")
    pack(source, store, threads=2)
    return store


def contents_of(folder: Path) -> Contents:
    return read_back(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_model_comes_back_whole(tmp_path: Path, num_shards: int) -> None:
    contents = llama_contents()
    store = packed(model_store(contents, num_shards=num_shards, metadata={"format": "pt"}))
    result = unpack(store, tmp_path / "model")
    assert contents_of(tmp_path / "model") == contents
    assert result.files == ("model.safetensors", *sorted(SMALL_FILES))
    assert files_below(tmp_path / "model") == sorted(result.files)
    for name, data in SMALL_FILES.items():
        assert (tmp_path / "model" / name).read_bytes() == data
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_reference_implementation_reads_every_dtype_back_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(70, 50)
    tensors = {
        "bf16": matrix.bfloat16(),
        "bf16.vector": matrix[0].bfloat16(),
        "bf16.cube": matrix.bfloat16().reshape(7, 10, 50).clone(),
        "bf16.special": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]).bfloat16(),
        "fp16": matrix.half(),
        "fp32": matrix.clone(),
        "fp64": matrix.double(),
        "fp8.e4m3": matrix.to(torch.float8_e4m3fn),
        "fp8.e5m2": matrix.to(torch.float8_e5m2),
        "complex": torch.complex(matrix, -matrix),
        "bool": matrix > 0,
        **{
            f"int.{dtype}": torch.randint(0, 100, (9, 11)).to(dtype)
            for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
        },
        **{
            f"uint.{dtype}": torch.randint(0, 100, (9, 11)).to(dtype)
            for dtype in (torch.uint16, torch.uint32, torch.uint64)
        },
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "empty.too": torch.empty(4, 0),
    }
    store = packed(MemoryStore({"model.safetensors": safetensors.torch.save(tensors, {"format": "pt"})}))
    unpack(store, tmp_path / "model")
    back = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        equal = back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(*equal), name


WHOLE_BYTE_DTYPES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
TENSORS = st.tuples(
    st.sampled_from(["BF16", "BF16", "BF16", *WHOLE_BYTE_DTYPES, "F4"]),
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 40, 300]), max_size=3),
    st.integers(0, 3),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    wanted=st.dictionaries(
        st.from_regex(r"(model\.)?(layers\.[0-9]\.)?[a-z_]{1,8}(\.weight|\.bias)?", fullmatch=True),
        TENSORS,
        min_size=1,
        max_size=8,
    ),
    num_shards=st.integers(1, 3),
    max_shard_bytes=st.sampled_from([1, 1000, 1 << 40]),
)
def test_any_set_of_tensors_comes_back_bit_for_bit(
    tmp_path_factory, monkeypatch, wanted, num_shards: int, max_shard_bytes: int
) -> None:
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    contents: Contents = {}
    for name, (dtype, shape, seed) in wanted.items():
        even = [*shape, 2] if DTYPE_BITS[dtype] < 8 else shape
        contents[name] = random_content(dtype, tuple(even), seed)
    folder = tmp_path_factory.mktemp("model")
    store = packed(model_store(contents, num_shards=min(num_shards, len(contents))))
    unpack(store, folder, max_shard_bytes=max_shard_bytes, threads=2)
    assert contents_of(folder) == contents


def test_tensors_of_many_parts_come_back_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    contents = {
        "model.embed_tokens.weight": random_content("BF16", (5001, 100)),
        "layers.0.w": random_content("F32", (301, 999)),
        "layers.0.odd": random_content("BF16", (333, 1001)),
    }
    store = packed(model_store(contents))
    assert len(open_artifact(store).parts) > 20
    unpack(store, tmp_path / "model")
    assert contents_of(tmp_path / "model") == contents


def test_tiers_that_were_cut_differently_come_together(tmp_path: Path) -> None:
    built = build_artifact(
        [("embed", {"w": ("BF16", (700, 1000))})],
        draft_elements=3 * FRAME_ELEMENTS,
        refine_elements=2 * FRAME_ELEMENTS,
    )
    store = built.store
    store.put("manifest.json", dump_manifest(built.manifest))
    unpack(store, tmp_path / "model")
    assert contents_of(tmp_path / "model")["w"][2] == built.originals["w"].tobytes()


def test_tied_tensors_are_written_under_both_names(tmp_path: Path) -> None:
    contents = llama_contents(tied=True)
    store = packed(model_store(contents))
    assert open_artifact(store).aliases
    result = unpack(store, tmp_path / "model")
    assert contents_of(tmp_path / "model") == contents
    assert result.num_tensors == len(contents)


def test_plain_safetensors_can_be_unpacked_into_other_shards(tmp_path: Path) -> None:
    contents = llama_contents()
    unpack(model_store(contents, num_shards=3), tmp_path / "model")
    assert contents_of(tmp_path / "model") == contents


def test_a_large_model_becomes_shards_with_an_index_that_transformers_reads(tmp_path: Path) -> None:
    contents = llama_contents()
    store = packed(model_store(contents))
    unpack(store, tmp_path / "model", max_shard_bytes=50_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == set(contents)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in contents.values())
    assert len(set(index["weight_map"].values())) > 3
    for name, file_name in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "model" / file_name, "pt") as file:
            assert name in file.keys()  # noqa: SIM118 (it is no mapping)
    assert contents_of(tmp_path / "model") == contents
    again = MemoryStore(
        {path: (tmp_path / "model" / path).read_bytes() for path in files_below(tmp_path / "model")}
    )
    assert set(open_artifact(again).by_name) == set(contents)


def test_shards_hold_at_most_their_bytes_unless_one_tensor_is_larger() -> None:
    contents = {
        f"w{number}": random_content("U8", (size,)) for number, size in enumerate([30, 80, 300, 20, 60])
    }
    manifest = pack(model_store(contents), MemoryStore()).manifest
    shards = plan_shards(manifest, 100)
    assert sorted(name for shard in shards for name in shard.names) == sorted(contents)
    sizes = [[manifest.by_name[name].size_bytes for name in shard.names] for shard in shards]
    assert all(sum(shard) <= 100 or len(shard) == 1 for shard in sizes)
    assert shards[0].file_name == f"model-00001-of-{len(shards):05}.safetensors"


def test_wide_elements_come_first_so_that_all_are_aligned() -> None:
    contents = {
        "a": random_content("U8", (3,)),
        "b": random_content("F64", (1,)),
        "c": random_content("BF16", (1,)),
    }
    (shard,) = plan_shards(pack(model_store(contents), MemoryStore()).manifest)
    assert shard.names == ("b", "c", "a")


# -- places


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match="is not empty"):
        unpack(packed(model_store(llama_contents())), tmp_path)
    assert files_below(tmp_path) == ["notes.txt"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(AlreadyExistsError, match="is a file"):
        unpack(packed(model_store(llama_contents())), tmp_path / "model", force=True)


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    unpack(packed(model_store(llama_contents())), tmp_path)
    assert "model.safetensors" in files_below(tmp_path)


def test_force_replaces_a_model_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("old")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("old")
    unpack(packed(model_store(llama_contents())), tmp_path, force=True)
    assert files_below(tmp_path) == sorted(["notes.txt", "model.safetensors", *SMALL_FILES])
    assert (tmp_path / "config.json").read_bytes() == SMALL_FILES["config.json"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


# -- failures


def test_a_damaged_part_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    store = packed(model_store(llama_contents()))
    name = next(info.name for info in store.list() if "refine" in info.name)
    data = bytearray(store.read(name, max_bytes=1 << 30)[0])
    data[-5] ^= 0x10
    store.put(name, bytes(data))
    with pytest.raises(IntegrityError, match=r"part \d+ \(head refine.*has a wrong digest"):
        unpack(store, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_draft_part_is_reported_as_itself(tmp_path: Path) -> None:
    """Refine parts wait for the drafts of their group; what is raised is the cause, not their giving up."""
    store = packed(model_store(llama_contents()))
    name = next(info.name for info in store.list() if "draft" in info.name)
    data = store.read(name, max_bytes=1 << 30)[0]
    store.put(name, bytes(len(data)))
    with pytest.raises(IntegrityError, match="part 0 "):
        unpack(store, tmp_path / "model", threads=3)


def test_a_damaged_refine_part_is_reported_as_itself_also_when_it_comes_before_its_draft(
    tmp_path: Path,
) -> None:
    store = packed(model_store(llama_contents()))
    manifest = open_artifact(store)
    (refine,) = manifest.parts_of(len(manifest.groups) - 1, Tier.REFINE)
    name = manifest.blobs[refine.blob].name
    data = bytearray(store.read(name, max_bytes=1 << 30)[0])
    data[refine.offset_bytes] ^= 0x10
    store.put(name, bytes(data))
    source = PacedSource(store)
    held = source.hold(reads_of(manifest, *manifest.parts_of(refine.group, Tier.DRAFT)))
    timer = threading.Timer(0.2, held.release)  # the refine part was read, and found wrong, long before
    timer.start()
    with pytest.raises(IntegrityError, match=rf"part {refine.index} "):
        unpack(source, tmp_path / "model", threads=4)
    timer.join()


def test_a_damaged_small_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    store = packed(model_store(llama_contents()))
    name = next(info.name for info in store.list() if info.name.endswith("tokenizer.json"))
    store.put(name, b'{"version": "6.6"}')
    with pytest.raises(IntegrityError, match=r"tokenizer\.json is damaged"):
        unpack(store, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnavailableError("the store went away")])
def test_an_interruption_leaves_nothing(tmp_path: Path, error) -> None:
    def interrupt(progress: object) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, UnavailableError)):
        unpack(packed(model_store(llama_contents())), tmp_path / "deep" / "model", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_parts_that_run_at_an_interruption_never_wait_for_one_that_was_given_up(monkeypatch) -> None:
    done = [threading.Event() for _ in range(8)]
    given_up = threading.Event()
    cancel = Future.cancel

    def cancel_slowly(future: Future) -> bool:
        if not cancel(future):
            return False
        given_up.set()  # from now on threads are free for the next parts
        time.sleep(0.01)
        return True

    def after_the_part_before(number: int) -> int:
        if number > 1:
            came.append(done[number - 1].wait(patience_s(5)))
        elif number == 1:
            given_up.wait()
        done[number].set()
        return number

    came: list[bool] = []
    monkeypatch.setattr(Future, "cancel", cancel_slowly)
    results = map_in_order(after_the_part_before, range(8), threads=2)
    assert next(results) == 0
    results.close()
    assert came
    assert all(came)


def test_an_interruption_keeps_a_directory_that_was_there(tmp_path: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        unpack(packed(model_store(llama_contents())), tmp_path, force=True, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_small_file_cannot_stand_for_weights(tmp_path: Path) -> None:
    store = packed(model_store(llama_contents()))
    manifest = open_artifact(store)
    hostile = manifest.files[0]._replace(name="model.safetensors")
    store.put("manifest.json", dump_manifest(manifest._replace(files=(hostile,))))
    with pytest.raises(ManifestError, match="where its weights would be written"):
        unpack(store, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_artifact_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="not the one that was pinned"):
        unpack(packed(model_store(llama_contents())), tmp_path / "model", digest=bytes(32))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_anything_is_fetched(tmp_path: Path) -> None:
    class Counting(MemoryStore):
        num_reads = 0

        def read_into(self, name: str, start: int, buffer: memoryview, *, version: str | None = None) -> None:
            Counting.num_reads += 1
            super().read_into(name, start, buffer, version=version)

    artifact = packed(model_store(llama_contents(hidden=256)))
    store = Counting({info.name: artifact.read(info.name, max_bytes=1 << 30)[0] for info in artifact.list()})
    with tiny_disk(tmp_path / "disk", 256 * 1024) as disk:
        with pytest.raises(NoSpaceError, match="No space left"):
            unpack(store, disk / "model")
        assert list(disk.iterdir()) == []
    assert Counting.num_reads == 0


def test_a_file_size_limit_is_no_space_and_leaves_nothing(tmp_path: Path) -> None:
    script = """
import resource, sys
from teneral.loader.errors import NoSpaceError
from teneral.loader.tools.unpack import unpack
from tests.support.checkpoints import llama_contents, model_store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    unpack(model_store(llama_contents(hidden=256)), sys.argv[1])
except NoSpaceError as error:
    print("no space:", error.hint)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert "no space: Free some space" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_stored_byte_once(tmp_path: Path) -> None:
    store = packed(model_store(llama_contents()))
    seen: list[tuple[int, int]] = []
    unpack(store, tmp_path, progress=lambda value: seen.append((value.done_bytes, value.total_bytes)))
    manifest = open_artifact(store)
    total = manifest.stored_bytes(Tier.DRAFT) + manifest.stored_bytes(Tier.REFINE)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_the_result_says_what_was_written(tmp_path: Path) -> None:
    contents = {"w": random_content("F32", (1000, 500))}
    result = unpack(packed(model_store(contents)), tmp_path / "model")
    assert result.render().startswith(f"unpacked 1 tensors, 2.0 MB, into {tmp_path / 'model'} in ")


def test_models_packed_from_disk_and_memory_are_alike(tmp_path: Path) -> None:
    objects = model_objects(llama_contents())
    unpack(packed(MemoryStore(objects)), tmp_path / "one")
    again = MemoryStore(
        {name: (tmp_path / "one" / name).read_bytes() for name in files_below(tmp_path / "one")}
    )
    unpack(packed(again), tmp_path / "two")
    assert contents_of(tmp_path / "two") == contents_of(tmp_path / "one")
