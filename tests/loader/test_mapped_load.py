"""A load without copies gives what one that reads gives, and fails where its files are not what they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.checkpoints import (
    Contents,
    llama_contents,
    model_objects,
    model_store,
    random_content,
    raw_file,
)
from tests.support.load import patience_s
from tests.support.weight_loads import mapped_load

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import ChangedError, InsufficientMemoryError, LoadCancelledError
from teneral.loader.format.checkpoint import manifest_in_place, open_checkpoint
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.plan import RowParts
from teneral.loader.load.targets.mapped import NotInPlaceError
from teneral.loader.memory.limits import Available
from teneral.loader.sources.base import Mappable
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)


def write(folder: Path, contents: Contents, *, num_shards: int = 1) -> FileStore:
    for name, data in model_objects(contents, num_shards=num_shards).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(padded(data) if name.endswith(".safetensors") else data)
    return FileStore(folder)


def padded(data: bytes) -> bytes:
    """The file with its content at a multiple of 8, as the reference implementation writes it."""
    size_bytes = int.from_bytes(data[:8], "little")
    padding = b" " * (-size_bytes % 8)
    prefix = (size_bytes + len(padding)).to_bytes(8, "little")
    return prefix + data[8 : 8 + size_bytes] + padding + data[8 + size_bytes :]


def tensor_of(load: WeightLoad, name: str) -> bytes:
    tensor = load.manifest.by_name[name]
    return load.slab(tensor.group)[tensor.offset_bytes :][: tensor.size_bytes].tobytes()


def begun(source: FileStore, options: LoadOptions | None = None) -> WeightLoad:
    load = mapped_load(source, open_artifact(source, in_place=True), options=options)
    load.start()
    return load


def wait_all(load: WeightLoad) -> None:
    for group in load.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)


def test_a_folder_behind_a_link_into_a_process_is_mapped(tmp_path: Path) -> None:
    """A model in an image is shown to the container next to it by such a link."""
    contents = llama_contents(num_layers=1)
    write(tmp_path / "model", contents)
    (tmp_path / "models").symlink_to(f"/proc/{os.getpid()}/root{tmp_path}/model")
    with begun(FileStore(tmp_path / "models")) as load:
        for group in load.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        name = next(iter(contents))
        assert tensor_of(load, name) == bytes(contents[name][2])


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("is_untied_first", [False, True])
def test_every_tensor_is_what_reading_gives(tmp_path: Path, num_shards: int, is_untied_first: bool) -> None:
    contents = llama_contents(num_layers=3)
    if is_untied_first:  # as Hugging Face sorts them: the head's two tensors lie at both ends of the file
        contents = {name: contents[name] for name in sorted(contents)}
    source = write(tmp_path, contents, num_shards=num_shards)
    here = WeightLoad(source, open_artifact(source))
    here.start()
    load = begun(source)
    wait_all(here)
    wait_all(load)
    assert {name: tensor_of(load, name) for name in contents} == {
        name: tensor_of(here, name) for name in contents
    }
    assert load.join(WAIT_S)
    progress, statistics = load.progress(), load.statistics()
    assert progress.state is LoadState.EXACT
    assert progress.fetched_bytes == progress.stored_bytes_total == statistics.direct_bytes
    assert load.manifest.weight_bytes == sum(len(content) for _, _, content in contents.values())
    load.close()
    here.close()


def test_groups_are_stretches_of_one_file_in_forward_order(tmp_path: Path) -> None:
    contents = llama_contents(num_layers=2)
    source = write(tmp_path, dict(sorted(contents.items())))
    manifest = open_artifact(source, in_place=True)
    assert [group.name for group in manifest.groups] == ["embed", "layers.0", "layers.1", "head", "head-2"]
    for group in manifest.groups:
        members = [manifest.tensors[index] for index in group.tensors]
        ends = [tensor.offset_bytes + tensor.size_bytes for tensor in members]
        assert [tensor.offset_bytes for tensor in members] == [0, *ends[:-1]]
        assert group.slab_bytes == ends[-1]
    mapped_load(source, manifest).close()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.norms.weight"])
def test_elements_that_do_not_begin_at_a_multiple_of_their_size_are_read_instead(
    tmp_path: Path, name: str
) -> None:
    """Older writers did not pad their headers, so that the content may begin at any byte."""
    _, _, data = random_content("BF16", (64,))
    header = {name: {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}}
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    source = FileStore(tmp_path)
    (stored,) = open_checkpoint(source).tensors.values()
    is_aligned = stored.entry.begin % 2 == 0
    assert (manifest_in_place(open_checkpoint(source)) is not None) == is_aligned
    manifest = open_artifact(source, in_place=True)
    assert is_aligned or manifest == open_artifact(source)


def test_packed_weights_are_not_mapped(tmp_path: Path) -> None:
    pack(model_store(llama_contents(num_layers=1)), FileStore(tmp_path))
    store = FileStore(tmp_path)
    with pytest.raises(NotInPlaceError):
        mapped_load(store, open_artifact(store, in_place=True))


def test_rows_that_are_asked_for_come_before_the_rest_of_their_table(tmp_path: Path) -> None:
    load = mapped_load(
        source := write(tmp_path, llama_contents(vocabulary=70_000)),
        open_artifact(source, in_place=True),
        options=LoadOptions(on_demand=True),
    )
    table = RowParts(load.manifest, "model.embed_tokens.weight")
    wanted = table.holding([69_999])
    load.want_parts(wanted)
    load.start()
    load.wait_parts(wanted, timeout_s=WAIT_S)
    wait_all(load)
    load.wait_parts(table.all, timeout_s=WAIT_S)


def test_a_file_that_is_cut_off_before_it_is_read_fails_the_load(tmp_path: Path) -> None:
    source = write(tmp_path, llama_contents())
    load = mapped_load(source, open_artifact(source, in_place=True))
    os.truncate(tmp_path / "model.safetensors", 5000)
    load.start()
    with pytest.raises(ChangedError, match=r"part \d+ .* of model\.safetensors"):
        load.wait(len(load.manifest.groups) - 1, timeout_s=WAIT_S)
    assert load.progress().state is LoadState.FAILED
    assert load.join(WAIT_S)


def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, llama_contents())
    manifest = open_artifact(source, in_place=True)
    write(tmp_path, llama_contents(dtype="F32"))
    with pytest.raises(ChangedError):
        mapped_load(source, manifest)


def test_weights_stay_when_their_file_is_replaced_by_renaming(tmp_path: Path) -> None:
    source = write(tmp_path / "model", llama_contents())
    load = begun(source)
    wait_all(load)
    before = {name: tensor_of(load, name) for name in load.manifest.by_name}
    load.close()
    source.close()
    write(tmp_path / "other", llama_contents(dtype="F32"))
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "model" / "model.safetensors")
    assert {name: tensor_of(load, name) for name in load.manifest.by_name} == before


def test_slabs_outlive_the_load_and_writing_does_not_reach_the_file(tmp_path: Path) -> None:
    source = write(tmp_path, llama_contents())
    load = begun(source)
    wait_all(load)
    slab, stored = load.slab(1), (tmp_path / "model.safetensors").read_bytes()
    load.close()
    del load
    slab[:] = 0
    assert not slab.any()
    assert (tmp_path / "model.safetensors").read_bytes() == stored


def test_a_load_that_was_cancelled_says_so_at_its_gates(tmp_path: Path) -> None:
    source = write(tmp_path, llama_contents())
    load = mapped_load(source, open_artifact(source, in_place=True))
    load.cancel()
    load.start()
    with pytest.raises(LoadCancelledError):
        load.wait(0, timeout_s=WAIT_S)
    assert load.progress().state is LoadState.CANCELLED


def test_weights_that_would_not_stay_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, llama_contents())
    monkeypatch.setattr("teneral.loader.load.room.available", lambda: Available(1, "a test's limit"))
    with pytest.raises(InsufficientMemoryError, match="a test's limit"):
        mapped_load(source, open_artifact(source, in_place=True))


def test_a_budget_given_by_the_options_bounds_mapped_weights_too(tmp_path: Path) -> None:
    source = write(tmp_path, llama_contents())
    manifest = open_artifact(source, in_place=True)
    with pytest.raises(InsufficientMemoryError, match="as the options say"):
        mapped_load(source, manifest, options=LoadOptions(available_bytes=manifest.weight_bytes - 1))


def test_only_folders_of_this_machine_can_be_mapped(tmp_path: Path) -> None:
    assert isinstance(FileStore(tmp_path), Mappable)
    assert not isinstance(model_store(llama_contents()), Mappable)


def test_a_manifest_of_other_slabs_is_no_ground_for_mapping(tmp_path: Path) -> None:
    manifest: Manifest = open_artifact(source := write(tmp_path, llama_contents(num_layers=2)))
    with pytest.raises(NotInPlaceError, match="stretches"):
        mapped_load(source, manifest)
