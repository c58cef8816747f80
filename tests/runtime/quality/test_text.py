from __future__ import annotations

from pathlib import Path

import pytest

from teneral.loader.errors import NotFoundError, UsageError
from teneral.runtime.quality.text import MAX_TEXT_BYTES, EvaluationText, read_text


def test_without_a_file_there_is_a_small_text_of_many_sentences():
    text = read_text(None)
    assert text.name is None
    assert 2000 < len(text.content) < 3000
    assert len(text.sentences()) > 30


def test_a_file_is_read_as_it_is(tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_text("Grüße.\n  Und mehr!\n", encoding="utf-8")
    assert read_text(str(path)) == EvaluationText(str(path), "Grüße.\n  Und mehr!\n")


def test_sentences_end_at_their_marks_and_at_the_ends_of_lines_and_count_once():
    text = EvaluationText(
        None, "One is here. Two? Three!\nfour without a mark\n-----\n\nOne is here. Version 3.11 is out."
    )
    assert text.sentences() == [
        "One is here.",
        "Two?",
        "Three!",
        "four without a mark",
        "Version 3.11 is out.",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x" * (MAX_TEXT_BYTES + 1), "larger than"),
        (b"\xff\xfe", "not UTF-8"),
        (b" \n ", "no text"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_text(str(path))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"nowhere\.txt"):
        read_text(str(tmp_path / "nowhere.txt"))
