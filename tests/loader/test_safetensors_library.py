"""The strict reader of safetensors against the `safetensors` library: both read alike what both accept, and what
only the library accepts is refused by name (docs/decisions/0053).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from teneral.loader.errors import CheckpointError
from teneral.loader.format.safetensors import METADATA_KEY, parse_header

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="headers without content need memory files")

DTYPES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1}
# Why we refuse what the library accepts: words of our errors.
STRICTER = (
    "stands there twice",
    "is not a usable tensor name",
    "does not hold a JSON object where it must",
    "needs dtype, shape and data_offsets",
    "is not a table of texts",
    "is not a shape",
    "unknown dtype",
)


class Read(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def ours(header: bytes, data_bytes: int) -> list[Read]:
    """In the order of their bytes, counted from the data's beginning. Raises `CheckpointError`."""
    file = parse_header(header, 8 + len(header) + data_bytes, where="file")
    entries = file.entries.values()
    start = file.data_start
    return [Read(each.name, each.dtype, each.shape, each.begin - start, each.end - start) for each in entries]


def of_library(header: bytes, data_bytes: int) -> list[Read]:
    """The library's reads, to compare with `ours`. It checks that tensors lie back to back, and raises
    `SafetensorError`. The content is a hole in a file.
    """
    fd = os.memfd_create("header")
    try:
        os.write(fd, struct.pack("<Q", len(header)) + header)
        os.ftruncate(fd, 8 + len(header) + data_bytes)
        found, end = [], 0
        with safe_open(f"/proc/self/fd/{fd}", "np") as file:
            for name in file.offset_keys():
                tensor = file.get_slice(name)
                dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                begin = end
                for size in shape:
                    assert size >= 0
                end = begin + _num(shape) * DTYPES[dtype]
                found.append(Read(name, dtype, shape, begin, end))
        return found
    finally:
        os.close(fd)


def _num(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


names = st.one_of(
    st.sampled_from(["a", "b", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "ä"]),
    st.text(max_size=6),
)
sizes = st.integers(0, 4)
shapes = st.one_of(st.lists(sizes, max_size=4), st.just([1] * 33))


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """The text of a header, mostly right but for one thing or another, and the bytes of content behind it."""
    position, fields = 0, []
    for name, dtype, shape in draw(
        st.lists(st.tuples(names, st.sampled_from([*DTYPES]), shapes), max_size=5)
    ):
        end = position + _num(tuple(shape)) * DTYPES[dtype]
        entry: Any = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        change = draw(st.integers(0, 30))
        if change == 0:
            entry["data_offsets"] = [position + 1, end + 1]
        elif change == 1:
            entry["data_offsets"] = [end, position]
        elif change == 2:
            entry["dtype"] = draw(st.sampled_from(["F7", "f32", 1, None]))
        elif change == 3:
            entry["shape"] = draw(st.sampled_from([[-1], [2.0], ["2"], None, [True], [1 << 62, 4], 2]))
        elif change == 4:
            entry["more"] = 1
        elif change == 5:
            del entry[draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
        elif change == 6:
            entry = [dtype, shape, [position, end]]
        fields.append(f"{json.dumps(name)}:{json.dumps(entry)}")
        position = end
    meta = draw(st.sampled_from([None, {}, {"format": "pt"}, {"a": 1}, [], "x"]))
    if meta is not None:
        fields.append(f'"{METADATA_KEY}":{json.dumps(meta)}')
    if draw(st.booleans()):
        fields.reverse()
    text = "{" + ",".join(fields) + "}"
    before, behind = draw(st.sampled_from([("", ""), ("", "   "), (" ", ""), ("", "x"), ("\n", "\n")]))
    extra = draw(st.sampled_from([0] * 8 + [1, -1]))
    return (before + text + behind).encode("utf-8", "surrogatepass"), max(0, position + extra)


def check_alike(header: bytes, data_bytes: int) -> None:
    refusal: CheckpointError | None = None
    try:
        mine = ours(header, data_bytes)
    except CheckpointError as error:
        refusal = error
    try:
        theirs = of_library(header, data_bytes)
    except SafetensorError:
        assert refusal is not None, "we accept what the library refuses"
        return
    if refusal is None:
        assert sorted(mine) == sorted(theirs)
    else:
        assert any(words in refusal.message for words in STRICTER), refusal.message


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(headers())
@example((b"{}", 0))
def test_both_readers_agree_but_for_what_we_refuse_by_name(drawn: tuple[bytes, int]) -> None:
    check_alike(*drawn)


ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 120), st.binary(max_size=3), st.integers(0, 3))
def test_both_readers_agree_on_a_header_with_damaged_bytes(place: int, put: bytes, cut: int) -> None:
    text = f'{{"{METADATA_KEY}":{{"format":"pt"}},"name":{ENTRY}}}'.encode()
    place = min(place, len(text))
    check_alike(text[:place] + put + text[place + cut :], 2)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', "stands there twice"),
        (f'{{"{METADATA_KEY}":{{"a":"1","a":"2"}},"a":{ENTRY}}}', "stands there twice"),
        (f'{{"a\\u001b[31m":{ENTRY}}}', "is not a usable tensor name"),
        (f'{{"a\\u202e":{ENTRY}}}', "is not a usable tensor name"),
        (f'{{"":{ENTRY}}}', "is not a usable tensor name"),
        (f'{{"{"n" * 1025}":{ENTRY}}}', "is not a usable tensor name"),
        (f' {{"a":{ENTRY}}}', "does not hold a JSON object"),
        ('{"a":["U8",[2],[0,2]]}', "needs dtype, shape and data_offsets"),
        (f'{{"{METADATA_KEY}":null,"a":{ENTRY}}}', "is not a table of texts"),
        (
            '{"a":{"dtype":"U8","shape":[2,' + "1," * 31 + '1],"data_offsets":[0,2]}}',
            "is not a shape",
        ),
    ],
)
def test_we_refuse_by_name_what_the_library_accepts(header: str, words: str) -> None:
    assert of_library(header.encode(), 2)
    with pytest.raises(CheckpointError, match=words):
        ours(header.encode(), 2)


def test_the_librarys_content_of_every_tensor_is_that_of_our_offsets() -> None:
    header, content = b"", bytes(range(32))
    entries = {
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
        "a": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},
    }
    header = json.dumps(entries).encode()
    library = {name: bytes(entry["data"]) for name, entry in deserialize(_file(header, content))}
    assert {each.name: content[each.begin : each.end] for each in ours(header, 32)} == library


def _file(header: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + content
