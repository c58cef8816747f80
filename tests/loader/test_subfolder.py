"""A folder of a source that others share."""

from __future__ import annotations

import pytest
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import NotFoundError, SourceClosedError
from teneral.loader.sources.open import Subfolder


def test_objects_have_their_names_in_the_folder() -> None:
    store = MemoryStore({"a/b/one": b"12345", "a/b/c/two": b"2", "a/bc": b"3"})
    folder = Subfolder(store, "a/b")
    assert folder.url == f"{store.url.rstrip('/')}/a/b"
    data, info = folder.read("one", max_bytes=10)
    assert (data, info.name, info.size_bytes) == (b"12345", "one", 5)
    assert folder.stat("c/two").name == "c/two"
    assert [info.name for info in folder.list()] == ["c/two", "one"]
    assert [info.name for info in folder.list("c/")] == ["c/two"]
    memory = bytearray(3)
    folder.read_into("one", 1, memoryview(memory), version=info.version)
    assert memory == b"234"
    with pytest.raises(NotFoundError):
        folder.stat("two")


def test_closing_it_leaves_the_source_to_others() -> None:
    store = MemoryStore({"a/one": b"1", "two": b"2"})
    folder, whole = Subfolder(store, "a"), Subfolder(store, "")
    folder.close()
    with pytest.raises(SourceClosedError):
        folder.read("one", max_bytes=10)
    assert whole.read("two", max_bytes=10)[0] == b"2"
    assert whole.read("a/one", max_bytes=10)[0] == b"1"
