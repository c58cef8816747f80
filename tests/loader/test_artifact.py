"""Opening the model at an address, and pinning it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints import SMALL_FILES, llama_contents, model_objects, model_store
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import find_file, is_artifact, open_artifact, read_file
from teneral.loader.errors import (
    AccessDeniedError,
    ChangedError,
    FormatError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    UsageError,
)
from teneral.loader.sources.base import ObjectInfo
from teneral.loader.sources.open import split_pin
from teneral.loader.tools.pack.pack import pack


@pytest.fixture(scope="module")
def artifact() -> MemoryStore:
    store = MemoryStore(label="artifact")
    pack(model_store(llama_contents()), store)
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    return MemoryStore({info.name: store.read(info.name, max_bytes=1 << 30)[0] for info in store.list()})


@given(
    st.binary(min_size=32, max_size=32), st.sampled_from(["s3://b/m", "./a@b", "https://h/x@b3y", "@b3:x/y"])
)
def test_a_pin_is_split_off_an_address(digest: bytes, address: str) -> None:
    assert split_pin(f"{address}@b3:{digest.hex()}") == (address, digest)
    assert split_pin(f"{address}@b3:{digest.hex().upper()}") == (address, digest)


@pytest.mark.parametrize("address", ["", "s3://bucket/model", "user@host", "a@b4:00", "b3:" + "0" * 64])
def test_an_address_without_a_pin_stays_as_it_is(address: str) -> None:
    assert split_pin(address) == (address, None)


@pytest.mark.parametrize(
    "address",
    ["m@b3:", "m@b3:12", "m@b3:" + "0" * 63, "m@b3:" + "0" * 65, "m@b3:" + "g" * 64, "@b3:" + "0" * 64],
)
def test_half_a_pin_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="whole pin") as caught:
        split_pin(address)
    assert "teneral inspect" in caught.value.hint


def test_an_artifact_is_opened_by_its_manifest(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    assert is_artifact(artifact)
    assert manifest.digest is not None
    assert open_artifact(artifact, digest=manifest.digest) == manifest


def test_plain_safetensors_are_opened_alike() -> None:
    store = model_store(llama_contents())
    manifest = open_artifact(store)
    assert not is_artifact(store)
    assert manifest.digest is None
    assert set(manifest.by_name) == set(llama_contents())


class Guarded(MemoryStore):
    """A bucket that may be read from but not listed: it says "denied" about what does not exist."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise AccessDeniedError("listing is denied", may_be_absent=True)

    def stat(self, name: str) -> ObjectInfo:
        try:
            return super().stat(name)
        except NotFoundError as error:
            raise AccessDeniedError(f"{name} is denied", name=name, may_be_absent=True) from error

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        self.stat(name)
        return super().read(name, max_bytes=max_bytes)


def test_plain_safetensors_are_opened_where_absent_objects_count_as_denied() -> None:
    store = Guarded(model_objects(llama_contents()))
    assert not is_artifact(store)
    assert set(open_artifact(store).by_name) == set(llama_contents())


class Denying(MemoryStore):
    """Denies objects by their names, whether or not they are there."""

    def __init__(self, objects: dict[str, bytes], *denied: str, may_be_absent: bool, listed: bool) -> None:
        super().__init__(objects)
        self._denied = denied
        self._may_be_absent = may_be_absent
        self._listed = listed

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not self._listed:
            raise AccessDeniedError("listing is denied", may_be_absent=True)
        return super().list(prefix)

    def stat(self, name: str) -> ObjectInfo:
        if any(name.startswith(denied) for denied in self._denied):
            raise AccessDeniedError(f"{name} is denied", name=name, may_be_absent=self._may_be_absent)
        return super().stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        self.stat(name)
        return super().read(name, max_bytes=max_bytes)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("may_be_absent", [True, False])
def test_a_denied_manifest_never_falls_back_to_plain_weights(
    artifact: MemoryStore, may_be_absent: bool, listed: bool
) -> None:
    objects = {info.name: artifact.read(info.name, max_bytes=1 << 30)[0] for info in artifact.list()}
    store = Denying(
        {**objects, **model_objects(llama_contents())},
        "manifest.json",
        may_be_absent=may_be_absent,
        listed=listed,
    )
    for attempt in (open_artifact, is_artifact):
        with pytest.raises(AccessDeniedError, match=r"manifest\.json is denied"):
            attempt(store)


def test_refused_credentials_are_not_an_absent_manifest() -> None:
    """Also where the list shows that there is none: the next request would be refused as well."""
    store = Denying(model_objects(llama_contents()), "manifest.json", may_be_absent=False, listed=True)
    with pytest.raises(AccessDeniedError, match=r"manifest\.json is denied"):
        open_artifact(store)


def test_a_list_shows_that_a_denied_manifest_is_absent() -> None:
    store = Denying(
        model_objects(llama_contents()), "manifest.json", "absent-", may_be_absent=True, listed=True
    )
    assert set(open_artifact(store).by_name) == set(llama_contents())


def test_a_right_to_safetensors_alone_does_not_decide_about_the_manifest() -> None:
    weights = {
        name: data for name, data in model_objects(llama_contents()).items() if name.endswith(".safetensors")
    }
    with pytest.raises(AccessDeniedError, match="unknown whether there is") as caught:
        open_artifact(Guarded(weights))
    assert "s3:ListBucket" in caught.value.hint


def test_a_folder_in_which_all_is_denied_names_the_manifest() -> None:
    with pytest.raises(AccessDeniedError, match=r"manifest\.json is denied"):
        open_artifact(Guarded())
    with pytest.raises(AccessDeniedError, match=r"manifest\.json is denied"):
        open_artifact(Guarded(model_objects(llama_contents())), digest=bytes(32))


def test_a_replaced_artifact_is_refused_by_its_pin(artifact: MemoryStore) -> None:
    pinned = open_artifact(artifact).digest
    other = MemoryStore()
    pack(model_store(llama_contents(num_layers=1)), other)
    with pytest.raises(IntegrityError, match="pinned") as caught:
        open_artifact(other, digest=pinned)
    assert caught.value.expected == pinned.hex()


def test_a_pin_is_never_satisfied_by_plain_safetensors() -> None:
    with pytest.raises(NotFoundError, match="has no manifest") as caught:
        open_artifact(model_store(llama_contents()), digest=bytes(32))
    assert "remove the pin" in caught.value.hint


def test_a_truncated_manifest_is_an_error_and_not_a_fallback() -> None:
    store = model_store(llama_contents())
    store.put("manifest.json", b'{"format": "teneral"')
    with pytest.raises(ManifestError):
        open_artifact(store)


def test_files_are_read_and_checked(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    assert read_file(artifact, manifest, "1_Pooling/config.json") == SMALL_FILES["1_Pooling/config.json"]
    assert find_file(manifest, "config.json").size_bytes == len(SMALL_FILES["config.json"])
    assert find_file(manifest, "absent.json") is None


@pytest.mark.parametrize("content", [b"{}", b'{"model_type": "other"}', b""])
def test_a_file_with_other_bytes_is_refused(artifact: MemoryStore, content: bytes) -> None:
    store = copy_of(artifact)
    manifest = open_artifact(store)
    store.put(find_file(manifest, "config.json").path, content)
    with pytest.raises(IntegrityError, match=r"config\.json is damaged") as caught:
        read_file(store, manifest, "config.json")
    assert caught.value.got != caught.value.expected


def test_a_file_that_is_not_in_the_manifest_is_not_found_even_if_it_is_there(artifact: MemoryStore) -> None:
    store = copy_of(artifact)
    store.put("extra.json", b"{}")
    with pytest.raises(NotFoundError, match=r"no file extra\.json"):
        read_file(store, open_artifact(store), "extra.json")


@pytest.mark.parametrize("changed", [b"{}", SMALL_FILES["config.json"].swapcase()])
def test_a_plain_file_that_changed_is_noticed(changed: bytes) -> None:
    store = model_store(llama_contents())
    manifest = open_artifact(store)
    assert read_file(store, manifest, "config.json") == SMALL_FILES["config.json"]
    store.put("config.json", changed)
    with pytest.raises(ChangedError, match="version v1 was expected, v5 is there"):
        read_file(store, manifest, "config.json")


def test_a_file_that_swelled_is_not_read(artifact: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from teneral.loader import artifact as module

    monkeypatch.setattr(module, "MAX_SMALL_FILE_BYTES", 10)
    with pytest.raises(FormatError, match="allowed"):
        read_file(artifact, open_artifact(artifact), "config.json")
