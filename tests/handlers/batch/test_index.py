"""job.json: what makes two runs one job, and an index that is damaged or hostile."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.flipped_bits import accepted_flips, without_own_digest

from teneral.handlers.batch.index import (
    JobIdentity,
    JobIndex,
    check_same_job,
    dump_index,
    make_index,
    parse_index,
)
from teneral.handlers.batch.input import LineScanner
from teneral.handlers.batch.spec import JobFormatError, JobMismatchError

IDENTITY = JobIdentity("s3://bucket/in.jsonl", "abc", "f" * 64, {"max_line_bytes": "1024", "name": "m"})


def index_of(lines: list[dict[str, Any]], part_lines: int = 2) -> JobIndex:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    scanner = LineScanner(max_line_bytes=1024, max_lines=10_000, part_lines=part_lines)
    scanner.feed(data)
    return make_index(IDENTITY, scanner.finish(), size_bytes=len(data), max_line_bytes=1024)


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_an_index_comes_back_as_it_was_written(names: list[int], part_lines: int) -> None:
    index = index_of([{"custom_id": f"n{name}"} for name in names], part_lines)
    found = parse_index(dump_index(index))
    assert found == index
    first = {name: position for position, name in reversed(list(enumerate(names)))}
    assert [found.is_duplicate(position) for position in range(len(names))] == [
        first[name] != position for position, name in enumerate(names)
    ]


def test_thousands_of_duplicates_fit() -> None:
    index = index_of([{"custom_id": f"n{number * number % 1009}"} for number in range(9_000)], 100)
    assert parse_index(dump_index(index)) == index


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(IDENTITY, input="s3://bucket/other.jsonl"), "another input: s3://bucket/in.jsonl"),
        (replace(IDENTITY, input_version="def"), "another version of the input"),
        (replace(IDENTITY, model="e" * 64), "another model: ffff"),
        (replace(IDENTITY, options={"max_line_bytes": "99", "name": "m"}), "max_line_bytes 1024, not 99"),
    ],
)
def test_another_job_is_refused_by_what_is_another(other: JobIdentity, named: str) -> None:
    index = index_of([{"prompt": "a"}])
    check_same_job(index, IDENTITY, place="out/")
    assert other.key != IDENTITY.key
    with pytest.raises(JobMismatchError, match=named):
        check_same_job(index, other, place="out/")


def test_seeds_and_ids_are_the_lines_own_and_the_same_for_everybody() -> None:
    index, again = index_of([{"prompt": "a"}]), index_of([{"prompt": "a"}])
    seeds = [index.seed(number) for number in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [again.seed(number) for number in range(100)] == seeds
    assert index.record_id(1) != index.record_id(2)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"key": "0" * 64},
        {"model": "another"},
        {"options": {"max_line_bytes": "0"}},
        {"options": {}},
        {"records": 3},
        {"records": 2**60},
        {"lines": -1},
        {"starts": [0, 0]},
        {"starts": [0]},
        {"starts": [0, 2**52]},
        {"starts": [0, "1"]},
        {"starts": list(range(5_000))},
        {"first_lines": [2, 1]},
        {"first_lines": [0, 1]},
        {"part_records": [4, 0]},
        {"part_records": [1, 1]},
        {"duplicates": []},
        {"duplicates": ["AAAA"]},
        {"duplicates": ["!"]},
        {"duplicates": [7]},
        {"bytes": 2**60},
        {"openai": 2},
        {"extra": 1},
    ],
)
def test_what_is_not_an_index_is_refused(change: dict[str, Any]) -> None:
    index = index_of([{"prompt": str(number)} for number in range(4)])
    document = json.loads(without_own_digest(dump_index(index)))
    parse_index(json.dumps(document).encode())
    with pytest.raises(JobFormatError):
        parse_index(json.dumps(document | change).encode())


def test_every_flipped_bit_of_an_index_is_refused() -> None:
    assert accepted_flips(dump_index(index_of([{"prompt": "a"}, {"prompt": "a"}])), parse_index) == []


def test_an_index_of_an_older_worker_has_no_digest_of_itself_and_is_read() -> None:
    index = index_of([{"prompt": "a"}])
    assert parse_index(without_own_digest(dump_index(index))) == index


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_no_bytes_do_worse_than_be_refused(data: bytes) -> None:
    with pytest.raises(JobFormatError):
        parse_index(data)
