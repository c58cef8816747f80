"""The digests of tensors: what `b3sum` would say of each, and refused when they do not fit the manifest."""

from __future__ import annotations

import pytest
from blake3 import blake3
from tests.support.checkpoints import llama_contents, model_store
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.errors import ManifestError
from teneral.loader.format.tensor_digests import FILE_NAME, parse_tensor_digests, wrong_tensors
from teneral.loader.load.load import WeightLoad
from teneral.loader.tools.pack.pack import pack


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    pack(model_store(llama_contents()), store)
    return store


def test_they_are_those_of_the_original_tensors(store: MemoryStore) -> None:
    manifest = open_artifact(store)
    digests = parse_tensor_digests(read_file(store, manifest, FILE_NAME), manifest)
    contents = llama_contents()
    for tensor, digest in zip(manifest.tensors, digests, strict=True):
        assert digest == blake3(contents[tensor.name][2]).digest(), tensor.name


def test_what_was_loaded_is_the_original_and_a_flipped_bit_shows(store: MemoryStore) -> None:
    manifest = open_artifact(store)
    digests = parse_tensor_digests(read_file(store, manifest, FILE_NAME), manifest)
    with WeightLoad(store, manifest) as load:
        load.start()
        assert load.join(patience_s(30))

        def content(tensor):
            return load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].data

        assert wrong_tensors(manifest, digests, content) == []
        spoilt = manifest.tensors[5]
        content(spoilt)[0] ^= 0x80
        assert wrong_tensors(manifest, digests, content) == [spoilt]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data.upper(),
        lambda data: b"\xff" + data[1:],
        lambda data: b"z" + data[1:],
        lambda data: data.replace(b"  ", b" ", 1),
        lambda data: b"".join(reversed(data.splitlines(keepends=True))),
        lambda data: b"",
    ],
)
def test_what_does_not_fit_is_refused(store: MemoryStore, spoil) -> None:
    manifest = open_artifact(store)
    with pytest.raises(ManifestError):
        parse_tensor_digests(spoil(read_file(store, manifest, FILE_NAME)), manifest)
