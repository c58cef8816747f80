"""Safetensors files made to crash, exhaust or mislead a reader: each is refused by name, at no cost."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints import raw_file
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import CheckpointError
from teneral.loader.format.safetensors import MAX_HEADER_BYTES, parse_header, read_header

NAME = "evil.safetensors"


def refuse(data: bytes, match: str) -> CheckpointError:
    """Reads the file's header, which must fail naming the file."""
    store = MemoryStore({NAME: data})
    with pytest.raises(CheckpointError, match=match) as caught:
        read_header(store, store.stat(NAME))
    assert NAME in caught.value.where
    return caught.value


def entry(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("size_bytes", [0, 1, 7])
def test_a_file_too_short_for_its_prefix_is_refused(size_bytes: int) -> None:
    assert "interrupted download" in refuse(bytes(size_bytes), "too few").hint


@pytest.mark.parametrize("claimed", [MAX_HEADER_BYTES + 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_an_enormous_header_length_is_refused_without_reading(claimed: int) -> None:
    refuse(raw_file(b"{}", header_bytes=claimed), "of 100000000 allowed")


def test_a_header_that_reaches_behind_the_file_is_refused() -> None:
    refuse(raw_file(b"{}", header_bytes=3), "claims 3 bytes, but the file has only 10")


@pytest.mark.parametrize(
    "header",
    [b"", b"null", b"[]", b'"text"', b" {}", b"\xef\xbb\xbf{}", b"\x00\x00", b"PK\x03\x04", b"\x80\x04."],
)
def test_a_header_that_is_no_json_object_is_refused(header: bytes) -> None:
    refuse(raw_file(header), "JSON object")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"a"',
        b"{}{}",
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b'{"a": ' * 100_000,
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 10_000 + b"}",
        b"{'a': 1}",
    ],
)
def test_broken_or_bottomless_json_is_refused(header: bytes) -> None:
    refuse(raw_file(header), "does not hold valid JSON")


def test_a_tensor_that_stands_there_twice_is_refused() -> None:
    first, second = json.dumps(entry()), json.dumps(entry(offsets=(2, 4)))
    refuse(raw_file(f'{{"w": {first}, "w": {second}}}'.encode(), b"abcd"), "'w' stands there twice")


def test_a_key_that_stands_in_a_tensor_twice_is_refused() -> None:
    header = b'{"w": {"dtype": "U8", "dtype": "F64", "shape": [2], "data_offsets": [0, 2]}}'
    refuse(raw_file(header, b"ab"), "'dtype' stands there twice")


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        7,
        [],
        {},
        {"dtype": "U8", "shape": [2]},
        {"dtype": "U8", "data_offsets": [0, 2]},
        {"shape": [2], "data_offsets": [0, 2]},
    ],
)
def test_a_tensor_without_its_three_properties_is_refused(wrong: Any) -> None:
    refuse(raw_file({"w": wrong}, b"ab"), "w: needs dtype, shape and data_offsets")


@pytest.mark.parametrize("dtype", [None, 3, ["U8"], "u8", "F128", "", "OBJECT", "U8\n"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype: Any) -> None:
    assert "BF16" in refuse(raw_file({"w": entry(dtype=dtype)}, b"ab"), "unknown dtype").hint


@pytest.mark.parametrize(
    "shape",
    [
        None,
        2,
        "2",
        {"0": 2},
        [2.0],
        ["2"],
        [True, 2],
        [-2, -1],
        [None],
        [[2]],
        [1 << 63],
        [1 << 40, 1 << 40],
        [0, 1 << 60],
        [1] * 33,
    ],
)
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    refuse(raw_file({"w": entry(shape=shape)}, b"ab"), "is not a shape")


@pytest.mark.parametrize(
    "offsets",
    [None, 2, [0], [0, 1, 2], ["0", "2"], [0.0, 2.0], [False, 2], [-2, 0], [2, 0], [0, 1 << 70], {"0": 2}],
)
def test_what_are_no_offsets_are_refused(offsets: Any) -> None:
    refuse(raw_file({"w": entry(offsets=offsets)}, b"ab"), "are not offsets")


def test_infinite_numbers_are_refused() -> None:
    header = b'{"w": {"dtype": "U8", "shape": [Infinity], "data_offsets": [0, NaN]}}'
    refuse(raw_file(header, b"ab"), "is not a shape")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", [3]), ("U8", [1]), ("F32", [2]), ("F64", []), ("U8", [0]), ("F4", [2])]
)
def test_bytes_that_do_not_agree_with_dtype_and_shape_are_refused(dtype: str, shape: list[int]) -> None:
    refuse(
        raw_file({"w": entry(dtype=dtype, shape=shape)}, b"ab"), r"takes \d+ bytes, but its offsets span 2"
    )


@pytest.mark.parametrize("shape", [[1], [3], [3, 3]])
def test_packed_elements_that_end_within_a_byte_are_refused(shape: list[int]) -> None:
    refuse(raw_file({"w": entry("F4", shape, (0, 1))}, b"a"), "does not fill whole bytes")


@pytest.mark.parametrize(
    ("offsets", "what"),
    [
        ([(0, 2), (1, 3)], "overlaps the tensor before it"),
        ([(0, 2), (0, 2)], "overlaps the tensor before it"),
        ([(0, 2), (3, 5)], "leaves a hole before it"),
        ([(1, 3), (3, 5)], "leaves a hole before it"),
        ([(0, 2), (2, 4)], "1 bytes after the last tensor belong to nothing"),
        ([(0, 2), (2, 4), (4, 6)], "the file has only"),
        ([(0, 2), ((1 << 62), (1 << 62) + 2)], "leaves a hole before it"),
    ],
)
def test_overlaps_holes_and_remainders_are_refused(offsets: list[tuple[int, int]], what: str) -> None:
    header = {f"w{number}": entry(offsets=span) for number, span in enumerate(offsets)}
    refuse(raw_file(header, bytes(5)), what)


@pytest.mark.parametrize(
    "name", ["", "a\x00b", "a\nb", "a\x1b[2Jb", "\ud800", "\u202eabc", "x" * 1025, "é" * 600]
)
def test_names_that_harm_a_terminal_or_cannot_be_stored_are_refused(name: str) -> None:
    refuse(raw_file({name: entry()}, b"ab"), "not a usable tensor name")


@pytest.mark.parametrize("metadata", [None, 3, [], "text", {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_that_is_no_table_of_texts_is_refused(metadata: Any) -> None:
    refuse(raw_file({"__metadata__": metadata}), "not a table of texts")


def test_metadata_with_half_a_character_is_refused() -> None:
    refuse(raw_file(b'{"__metadata__": {"a": "\\ud800"}}'), "half a character")


def test_too_much_metadata_is_refused() -> None:
    refuse(raw_file({"__metadata__": {"a": "x" * (17 * 1024 * 1024)}}), "allowed")


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"0,", b'"a":0,'])
def test_a_header_that_would_swell_in_memory_is_refused_before_it_is_parsed(unit: bytes) -> None:
    header = b'{"a": [' + unit * (15_000_000 // len(unit))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="more than the 250000 tensors"):
            parse_header(header, 1 << 40, where=NAME)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


RIGHT_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "layer.weight": entry("BF16", [2, 3], [0, 12]),
        "layer.bias": entry("F32", [2], [12, 20]),
        "empty": entry("U8", [0], [20, 20]),
    }
).encode()


@given(st.integers(0, len(RIGHT_HEADER) - 1), st.integers(0, 255))
def test_a_header_with_any_one_byte_changed_still_describes_every_byte_or_is_refused(
    position: int, value: int
) -> None:
    header = bytearray(RIGHT_HEADER)
    header[position] = value
    try:
        entries = parse_header(bytes(header), 8 + len(header) + 20, where=NAME).entries
    except CheckpointError:
        return
    spans = sorted((one.begin, one.end) for one in entries.values() if one.size_bytes)
    assert spans == [(8 + len(header), 20 + len(header)), (20 + len(header), 28 + len(header))]


@given(st.binary(max_size=300))
def test_noise_behind_a_right_prefix_never_raises_anything_else(noise: bytes) -> None:
    store = MemoryStore({NAME: struct.pack("<Q", len(noise)) + noise})
    try:
        parsed = read_header(store, store.stat(NAME))
    except CheckpointError:
        return
    assert parsed.entries == {}
