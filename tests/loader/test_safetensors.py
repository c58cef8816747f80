"""The safetensors parser and writer, against the reference implementation and against themselves."""

from __future__ import annotations

import io

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints import raw_file, safetensors_file
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import ChangedError, CheckpointError
from teneral.loader.format.manifest import DTYPE_BITS
from teneral.loader.format.safetensors import (
    METADATA_KEY,
    SafetensorsWriter,
    TensorSpec,
    make_header,
    read_header,
)
from teneral.loader.sources.base import ObjectInfo
from teneral.runtime.backends.torch.tensors import TORCH_DTYPES


def header_of(data: bytes, name: str = "model.safetensors"):
    store = MemoryStore({name: data})
    return read_header(store, store.stat(name))


def test_every_dtype_of_the_reference_implementation_is_read_in_its_place() -> None:
    tensors = {
        name: torch.arange(6, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).reshape(2, 3)
        for name, dtype in TORCH_DTYPES.items()
        if dtype is not torch.bool
    }
    tensors["BOOL"] = torch.tensor([[True, False, True], [False, False, True]])
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    parsed = header_of(data)
    assert parsed.metadata == {"format": "pt"}
    assert set(parsed.entries) == set(TORCH_DTYPES)
    for name, entry in parsed.entries.items():
        assert entry.dtype == name
        assert entry.shape == (2, 3)
        assert data[entry.begin : entry.end] == bytes(tensors[name].view(torch.uint8).flatten().tolist())


def test_entries_stand_in_the_order_of_their_bytes_whatever_the_header_says() -> None:
    data = raw_file(
        {
            "late": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
            "early": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        },
        b"abcde",
    )
    parsed = header_of(data)
    assert list(parsed.entries) == ["early", "late"]
    assert data[parsed.entries["late"].begin : parsed.entries["late"].end] == b"de"


def test_scalars_and_empty_tensors_are_read() -> None:
    data = safetensors.torch.save(
        {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "vector": torch.ones(2)}
    )
    entries = header_of(data).entries
    assert (entries["scalar"].shape, entries["scalar"].size_bytes) == ((), 4)
    assert (entries["empty"].shape, entries["empty"].size_bytes) == ((0, 7), 0)


def test_a_file_without_tensors_is_read() -> None:
    assert header_of(raw_file({})).entries == {}


def test_a_header_longer_than_the_first_read_is_fetched_whole() -> None:
    contents = {f"tensor.{number:05}": ("U8", (1,), bytes([number % 256])) for number in range(4000)}
    data = safetensors_file(contents)
    entries = header_of(data).entries
    assert len(data) > 128 * 1024
    assert len(entries) == 4000
    assert data[entries["tensor.03999"].begin] == 3999 % 256


def test_a_file_that_changes_between_listing_and_reading_is_refused() -> None:
    store = MemoryStore({"model.safetensors": raw_file({})})
    stale = ObjectInfo("model.safetensors", store.stat("model.safetensors").size_bytes, "another version")
    with pytest.raises(ChangedError, match=r"model\.safetensors"):
        read_header(store, stale)


def test_sub_byte_dtypes_are_measured_packed() -> None:
    data = raw_file({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"abc")
    assert header_of(data).entries["w"].size_bytes == 3


SPECS = st.dictionaries(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=20).filter(
        lambda name: name != METADATA_KEY
    ),
    st.tuples(
        st.sampled_from(sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    max_size=8,
)


@given(SPECS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_what_the_writer_writes_the_parser_reads(specs, metadata) -> None:
    file = io.BytesIO()
    writer = SafetensorsWriter(
        file, [TensorSpec(name, dtype, tuple(shape)) for name, (dtype, shape) in specs.items()], metadata
    )
    for entry in writer.layout.entries.values():
        writer.write(bytes([len(entry.name) % 256]) * entry.size_bytes)
    layout = writer.finish()
    parsed = header_of(file.getvalue())
    assert parsed.entries == layout.entries
    assert parsed.metadata == metadata
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in parsed.entries.items()} == specs
    assert parsed.data_start % 8 == 0


def test_the_reference_implementation_reads_what_the_writer_wrote() -> None:
    file = io.BytesIO()
    writer = SafetensorsWriter(
        file, [TensorSpec("a", "F32", (2, 2)), TensorSpec("b", "U8", (3,))], {"format": "pt"}
    )
    content = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    writer.write(content.numpy().tobytes())
    writer.write(b"\x01")
    writer.write(memoryview(b"\x02\x03"))
    writer.finish()
    tensors = safetensors.torch.load(file.getvalue())
    assert torch.equal(tensors["a"], content)
    assert tensors["b"].tolist() == [1, 2, 3]


def test_the_writer_refuses_too_much_and_too_little_content() -> None:
    writer = SafetensorsWriter(io.BytesIO(), [TensorSpec("a", "U8", (4,))])
    with pytest.raises(CheckpointError, match="1 bytes more than the tensors hold"):
        writer.write(bytes(5))
    writer.write(bytes(3))
    with pytest.raises(CheckpointError, match="1 bytes of tensor content were never written"):
        writer.finish()


def test_the_writer_refuses_two_tensors_of_one_name() -> None:
    with pytest.raises(CheckpointError, match="two tensors are called 'a'"):
        make_header([TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (1,))])
