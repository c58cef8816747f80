"""Model directories as they are in the world: which files count, and where every tensor lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.support.checkpoints import (
    SMALL_FILES,
    Contents,
    index_file,
    llama_contents,
    model_objects,
    model_store,
    random_content,
    safetensors_file,
)
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import AccessDeniedError, CheckpointError, NotFoundError, UsageError
from teneral.loader.format.checkpoint import MIN_DIRECT_BYTES, manifest_of, open_checkpoint
from teneral.loader.format.manifest import Codec, Encoding, Manifest, Tier
from teneral.loader.format.safetensors import FIRST_READ_BYTES
from teneral.loader.sources.base import ObjectInfo
from teneral.loader.sources.file.store import FileStore

WAIT_S = patience_s(30)


class Unlistable(MemoryStore):
    """A store like an HTTP server: objects can be read, but not listed."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise UsageError("an HTTP folder cannot be listed")


class Guarded(Unlistable):
    """A bucket that may be read from but not listed: absent objects are reported as denied."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise AccessDeniedError("listing is denied", may_be_absent=True)

    def stat(self, name: str) -> ObjectInfo:
        try:
            return super().stat(name)
        except NotFoundError as error:
            raise AccessDeniedError("denied", name=name, may_be_absent=True) from error


def content_in(store: MemoryStore, manifest: Manifest) -> Contents:
    """All tensors, put together from the manifest's parts as a loader would."""
    slabs = [bytearray(group.slab_bytes) for group in manifest.groups]
    for part in manifest.parts:
        data, _ = store.read(manifest.blobs[part.blob].name, max_bytes=1 << 30)
        for segment in part.segments:
            tensor = manifest.tensors[segment.tensor]
            (plane,) = segment.planes
            assert plane.codec is Codec.RAW
            begin = part.offset_bytes + plane.offset_bytes
            place = tensor.offset_bytes + segment.start * tensor.element_bytes
            assert plane.offset_bytes + plane.size_bytes <= part.size_bytes
            slabs[tensor.group][place : place + plane.size_bytes] = data[begin : begin + plane.size_bytes]
    return {
        tensor.name: (
            tensor.dtype,
            tensor.shape,
            bytes(slabs[tensor.group][tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]),
        )
        for tensor in manifest.tensors
    }


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("kind", [MemoryStore, Unlistable, Guarded])
def test_every_tensor_is_found_whatever_the_source_can_do(kind: type[MemoryStore], num_shards: int) -> None:
    contents = llama_contents()
    store = kind(model_objects(contents, num_shards=num_shards, metadata={"format": "pt"}))
    checkpoint = open_checkpoint(store)
    assert content_in(store, manifest_of(checkpoint)) == contents
    assert checkpoint.metadata == {"format": "pt"}
    assert {info.name for info in checkpoint.files} == set(SMALL_FILES)
    assert checkpoint.weight_bytes == sum(len(data) for _, _, data in contents.values())


def test_a_directory_on_disk_is_read(tmp_path) -> None:
    contents = llama_contents(num_layers=1)
    for name, data in model_objects(contents, num_shards=2).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    checkpoint = open_checkpoint(FileStore(tmp_path))
    assert set(checkpoint.tensors) == set(contents)
    assert len(checkpoint.shards) == 2


def test_weights_of_any_name_make_a_checkpoint_without_a_config() -> None:
    contents = {"a": random_content("F16", (3, 5)), "b": random_content("I64", ())}
    store = MemoryStore(
        {
            "first.safetensors": safetensors_file({"a": contents["a"]}),
            "second.safetensors": safetensors_file({"b": contents["b"]}),
            "sub/third.safetensors": b"not looked at",
        }
    )
    assert content_in(store, manifest_of(open_checkpoint(store))) == contents


def test_the_single_file_is_preferred_to_shards_as_transformers_prefers_it() -> None:
    contents = {"w": random_content("U8", (4,))}
    objects = model_objects(llama_contents(), num_shards=2)
    store = MemoryStore({**objects, "model.safetensors": safetensors_file(contents)})
    assert set(open_checkpoint(store).tensors) == {"w"}


def test_files_that_the_index_does_not_name_are_left_alone() -> None:
    objects = model_objects(llama_contents(num_layers=1), num_shards=2)
    store = MemoryStore({**objects, "consolidated.safetensors": b"another copy"})
    assert len(open_checkpoint(store).shards) == 2


def test_tensors_that_the_index_forgot_are_kept() -> None:
    contents = {"a": random_content("U8", (4,)), "b": random_content("U8", (4,))}
    store = MemoryStore(
        {
            "one.safetensors": safetensors_file(contents),
            "model.safetensors.index.json": index_file({"a": "one.safetensors"}),
        }
    )
    assert set(open_checkpoint(store).tensors) == {"a", "b"}


def test_code_and_pickles_are_never_carried() -> None:
    store = model_store(llama_contents(num_layers=1))
    for name in ("modeling_llama.py", "pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        store.put(name, b"cos\nsystem\n")
    assert {info.name for info in open_checkpoint(store).files} == set(SMALL_FILES)


def test_metadata_of_shards_is_merged_and_the_first_counts() -> None:
    store = MemoryStore(
        {
            "a.safetensors": safetensors_file({"a": random_content("U8", (1,))}, {"format": "pt", "by": "a"}),
            "b.safetensors": safetensors_file({"b": random_content("U8", (1,))}, {"by": "b", "more": "b"}),
        }
    )
    assert open_checkpoint(store).metadata == {"format": "pt", "by": "a", "more": "b"}


def test_plain_weights_are_exact_at_once_and_carry_no_digests() -> None:
    manifest = manifest_of(open_checkpoint(model_store(llama_contents())))
    assert manifest.digest is None
    assert {tensor.encoding for tensor in manifest.tensors} == {Encoding.WHOLE}
    assert {(part.tier, part.digest) for part in manifest.parts} == {(Tier.DRAFT, None)}
    assert [part.index for part in manifest.parts] == list(range(len(manifest.parts)))
    assert [part.group for part in manifest.parts] == sorted(part.group for part in manifest.parts)


def test_blobs_are_pinned_to_the_versions_that_were_seen() -> None:
    store = model_store(llama_contents(num_layers=1))
    (blob,) = manifest_of(open_checkpoint(store)).blobs
    assert blob.version == store.stat("model.safetensors").version


def test_large_tensors_have_parts_of_their_own_and_small_neighbours_share_one() -> None:
    large = MIN_DIRECT_BYTES
    contents: Contents = {
        "layers.0.a": random_content("U8", (large,)),
        "layers.0.b": random_content("U8", (10,)),
        "layers.0.c": random_content("U8", (3, 3)),
        "layers.0.d": random_content("U8", (large + 1,)),
        "layers.0.e": random_content("U8", (5,)),
    }
    store = model_store(contents)
    manifest = manifest_of(open_checkpoint(store))
    members = [
        tuple(manifest.tensors[segment.tensor].name[-1] for segment in part.segments)
        for part in manifest.parts
    ]
    assert members == [("a",), ("b", "c"), ("d",), ("e",)]
    assert content_in(store, manifest) == contents


def test_empty_tensors_are_known_but_not_read() -> None:
    contents = {"e": random_content("F32", (0, 4)), "s": random_content("F32", ())}
    store = model_store(contents)
    manifest = manifest_of(open_checkpoint(store))
    assert manifest.by_name["e"].shape == (0, 4)
    assert [len(part.segments) for part in manifest.parts] == [1]
    assert content_in(store, manifest) == contents


def test_an_empty_folder_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="nothing at memory://objects"):
        open_checkpoint(MemoryStore())


class Denying(Unlistable):
    """Denies one object that exists. `code` is what the store says of it; absent objects are not found."""

    def __init__(self, objects: dict[str, bytes], denied: str, *, may_be_absent: bool) -> None:
        super().__init__(objects)
        self._denied = AccessDeniedError(f"{denied} is denied", name=denied, may_be_absent=may_be_absent)

    def stat(self, name: str) -> ObjectInfo:
        if name == self._denied.name:
            raise self._denied
        return super().stat(name)


@pytest.mark.parametrize("may_be_absent", [True, False])
@pytest.mark.parametrize("denied", ["model.safetensors", "config.json"])
def test_a_denied_object_is_not_taken_for_an_absent_one(denied: str, may_be_absent: bool) -> None:
    objects = {**model_objects(llama_contents()), "pytorch_model.bin": b"?"}
    with pytest.raises(AccessDeniedError, match=f"{denied} is denied"):
        open_checkpoint(Denying(objects, denied, may_be_absent=may_be_absent))


class HiddenWeights(Guarded):
    """Denies the weights as well, which are there."""

    def stat(self, name: str) -> ObjectInfo:
        if name == "model.safetensors":
            raise AccessDeniedError("denied", name=name, may_be_absent=True)
        return super().stat(name)


def test_weights_that_may_be_denied_are_not_called_pickled() -> None:
    store = HiddenWeights({**model_objects(llama_contents()), "pytorch_model.bin": b"?"})
    with pytest.raises(AccessDeniedError, match=r"unknown whether there is") as caught:
        open_checkpoint(store)
    assert "s3:ListBucket" in caught.value.hint


def test_refused_credentials_are_not_a_folder_without_a_list() -> None:
    class Expired(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            raise AccessDeniedError("the session token has expired")

    with pytest.raises(AccessDeniedError, match="expired"):
        open_checkpoint(Expired(model_objects(llama_contents())))


def test_a_folder_that_may_not_be_read_says_so() -> None:
    with pytest.raises(AccessDeniedError):
        open_checkpoint(Guarded())


@pytest.mark.parametrize(
    ("name", "what", "way"),
    [
        ("pytorch_model.bin", "pickled weights", "save_pretrained"),
        ("model.pt", "pickled weights", "save_pretrained"),
        ("model.gguf", "a GGUF file", "the file's own address"),
        ("tf_model.h5", "TensorFlow weights", "save_pretrained"),
    ],
)
def test_weights_of_another_format_are_named_with_a_way_to_them(name: str, what: str, way: str) -> None:
    with pytest.raises(CheckpointError, match=what) as caught:
        open_checkpoint(MemoryStore({"config.json": b"{}", name: b"?"}))
    assert name in caught.value.message
    assert way in caught.value.hint


def test_pickles_are_noticed_where_nothing_can_be_listed() -> None:
    with pytest.raises(CheckpointError, match="pickled weights"):
        open_checkpoint(Unlistable({"config.json": b"{}", "pytorch_model.bin": b"?"}))


def test_a_folder_without_weights_says_what_was_expected() -> None:
    with pytest.raises(CheckpointError, match=r"neither manifest\.json nor") as caught:
        open_checkpoint(MemoryStore({"README.md": b"hello"}))
    assert "model.safetensors" in caught.value.hint


class Afar(MemoryStore):
    """A store across the network. A list of its objects is not there before the first read has come."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int]] = []
        self.after_first_read: dict[str, bytes] = {}  # objects that are replaced then
        self._was_read = threading.Event()

    def quiesce(self) -> None:
        """Nothing is kept."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        assert self._was_read.wait(WAIT_S)
        return super().list(prefix)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        self.reads.append((name, start))
        try:
            return super().read_into(name, start, buffer, version=version)
        finally:
            for replaced, data in self.after_first_read.items():
                self.put(replaced, data)
            self.after_first_read = {}
            self._was_read.set()


def large(seed: int = 0) -> dict[str, bytes]:
    contents = {"w": random_content("F32", (200, 200), seed), "b": random_content("F32", (8,), seed)}
    return {"model.safetensors": safetensors_file(contents)}


def test_the_usual_files_header_is_on_its_way_while_others_are_looked_for() -> None:
    store = Afar(large())
    assert open_checkpoint(store) == open_checkpoint(store.reopen())
    assert store.reads == [("model.safetensors", 0)]


def test_a_header_that_came_before_its_file_was_replaced_does_not_count() -> None:
    store = Afar(large())
    contents = {"other": random_content("F32", (300, 200))}
    store.after_first_read = {"model.safetensors": safetensors_file(contents)}
    assert set(open_checkpoint(store).tensors) == {"other"}
    assert store.reads == [("model.safetensors", 0)] * 2


def test_a_file_that_is_shorter_than_what_was_asked_for_is_read_as_it_is() -> None:
    store = Afar({"model.safetensors": safetensors_file({"w": random_content("F32", (9, 9))})})
    assert len(store.read("model.safetensors", max_bytes=1 << 30)[0]) < FIRST_READ_BYTES
    assert open_checkpoint(store) == open_checkpoint(store.reopen())


def test_a_model_in_shards_is_asked_in_vain_for_the_usual_file() -> None:
    objects = model_objects(llama_contents(), num_shards=2)
    assert "model.safetensors" not in objects
    store = Afar(objects)
    assert open_checkpoint(store) == open_checkpoint(store.reopen())
