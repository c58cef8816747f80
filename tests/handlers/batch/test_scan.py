"""The input as a stream: lines, however the bytes are cut; parts; and which lines take another's custom_id."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.inspection import held_by

from teneral.handlers.batch import input
from teneral.handlers.batch.input import (
    LineProblem,
    LineScanner,
    LineSplitter,
    RawLine,
    Scanned,
    merged,
    parse_line,
)
from teneral.loader.errors import UsageError

MAX_LINE = 64
pieces = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b"a", b"{}", b" ", b"\xef\xbb\xbf", b"x" * 63, b"x" * 64, b"x" * 65, b"\xff"]
)
inputs = st.lists(pieces, max_size=30).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The bytes in chunks; some may be empty."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def split(chunks: list[bytes], max_line_bytes: int = MAX_LINE) -> list[RawLine]:
    splitter = LineSplitter(max_line_bytes)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + list(splitter.finish())


def expected_lines(data: bytes) -> list[RawLine]:
    lines, start = [], 0
    for number, whole in enumerate(data.split(b"\n"), start=1):
        text = whole.removesuffix(b"\r")
        text = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
        lines.append(RawLine(number, start, text if len(text) <= MAX_LINE else None))
        start += len(whole) + 1
    return lines if lines and not data.endswith(b"\n") and data else lines[:-1]


def scanned(lines: list[object], *, part_lines: int = 4, places: list[int] | None = None) -> Scanned:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    data = b"".join(text + b"\n" for text in texts)
    scanner = LineScanner(max_line_bytes=1024, max_lines=1000, part_lines=part_lines)
    for chunk in cut(data, places or []):
        scanner.feed(chunk)
    return scanner.finish()


def duplicates(found: Scanned) -> list[int]:
    bits = "".join(f"{byte:08b}" for byte in found.duplicates)
    return [index for index, bit in enumerate(bits) if bit == "1"]


def test_a_custom_id_that_a_line_gives_beats_the_number_of_another_line() -> None:
    """Wherever the two stand: line 2 has no id, and line 4 is called "2"."""
    lines: list[object] = [
        {"prompt": "a"},
        {"prompt": "b"},
        {"prompt": "c"},
        {"prompt": "d", "custom_id": "2"},
    ]
    assert duplicates(scanned(lines)) == [1]
    lines[3] = {"prompt": "d", "custom_id": 2}
    assert duplicates(scanned(lines)) == [1]
    assert duplicates(scanned([{"prompt": "a", "custom_id": "2"}, {"prompt": "b"}])) == [1]
    lines += [{"prompt": "e", "custom_id": "2"}]
    assert duplicates(scanned(lines)) == [1, 4], "of those that give it, the first counts"


def test_a_line_whose_number_is_taken_says_so() -> None:
    raw = RawLine(2, 0, b'{"prompt": "b"}')
    line = parse_line(raw, is_duplicate=True, job_is_openai=False, max_line_bytes=100)
    assert line.custom_id is None
    assert isinstance(line.request, LineProblem)
    assert line.request.code == "duplicate_custom_id"
    assert "its number is that of another line" in line.request.message


@given(inputs, st.lists(st.integers(0, 10_000), max_size=8))
@settings(max_examples=300, deadline=None)
def test_lines_are_the_same_however_the_bytes_are_cut(data: bytes, places: list[int]) -> None:
    assert split(cut(data, places)) == expected_lines(data)


def test_a_line_that_is_too_long_is_not_held() -> None:
    splitter = LineSplitter(10)
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 1000)) == []
        assert len(held_by(splitter)) <= 14
    assert list(splitter.feed(b"\nshort\n")) == [RawLine(1, 0, None), RawLine(2, 1_000_001, b"short")]


@given(
    st.lists(
        st.sampled_from([b"", b"  ", b"no json", {"prompt": "a"}, {"custom_id": "x", "prompt": "b"}]),
        max_size=40,
    ),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_parts_hold_all_records_once_in_order(
    lines: list[object], places: list[int], part_lines: int
) -> None:
    found = scanned(lines, part_lines=part_lines, places=places)
    is_record = [not (isinstance(line, bytes) and not line.strip()) for line in lines]
    assert found.num_records == sum(is_record)
    assert found.num_lines == len(lines)
    assert sum(part.num_records for part in found.parts) == found.num_records
    assert all(0 < part.num_records <= part_lines for part in found.parts)
    records = [number for number, counts in enumerate(is_record, start=1) if counts]
    for before, after in pairwise(found.parts):
        assert before.end_byte == after.start_byte
        assert before.first_record + before.num_records == after.first_record
    for part in found.parts:
        assert part.first_line == records[part.first_record]


def test_of_lines_with_one_custom_id_all_but_the_first_are_duplicates() -> None:
    named = [{"custom_id": name} for name in ("a", "b", "a", "c", "a", "b")]
    assert duplicates(scanned(named)) == [2, 4, 5]


def test_the_number_of_a_line_is_its_custom_id_and_may_be_anothers() -> None:
    assert duplicates(
        scanned([{"custom_id": "2"}, {"prompt": "a"}, {"custom_id": 2}, {"custom_id": None}])
    ) == [1, 2]


def test_lines_that_have_no_usable_custom_id_are_nobodys_duplicates() -> None:
    assert (
        duplicates(scanned([b"junk", b"junk", {"custom_id": []}, {"custom_id": []}, {"custom_id": ""}])) == []
    )


def test_a_large_line_is_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input, "MAX_PART_BYTES", 200)
    found = scanned(
        [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c" * 300}, {"prompt": "d"}], part_lines=100
    )
    assert [part.num_records for part in found.parts] == [2, 1, 1]


def test_of_lines_to_be_embedded_a_part_holds_more() -> None:
    assert [part.num_records for part in scanned([{"input": "a"}] * 40).parts] == [32, 8]
    calls = [{"url": "/v1/embeddings", "body": {}, "custom_id": str(number)} for number in range(40)]
    assert [part.num_records for part in scanned(calls).parts] == [32, 8]


@given(st.integers(0, 300), st.integers(1, 50))
def test_there_are_never_too_many_parts(count: int, max_parts: int) -> None:
    starts = [(index, index, index) for index in range(count)]
    left = merged(starts, max_parts, 1)
    assert len(left) <= max_parts
    assert left[:1] == starts[:1]


def test_more_lines_than_allowed_are_refused() -> None:
    scanner = LineScanner(max_line_bytes=100, max_lines=3, part_lines=2)
    scanner.feed(b"\n\n\n")
    with pytest.raises(UsageError, match="more than 3 lines") as caught:
        scanner.feed(b"{}\n")
    assert caught.value.key == "max_lines"
