"""The check of the code's English: the words it counts, and the ones it must not."""

from __future__ import annotations

import pytest
from scripts.english import private_words, riddles


@pytest.mark.parametrize(
    "text",
    [
        "nobody waits",
        "Nobody waits",
        "def test_nobody_waits",
        "said = 1",
        "beside_the_load",
        "BESIDE",
        "so many",
        "SO_MANY",
        "what\n    stands",
        "# so\n# many",
        "the child is told",
    ],
)
def test_private_words_count_in_prose_and_in_identifiers(text: str) -> None:
    assert len(private_words(text)) == 1


@pytest.mark.parametrize(
    "text", ["besides", "untold", "threshold", "aforesaid", "some many", "what a stand", "unsaid"]
)
def test_other_words_that_contain_them_do_not_count(text: str) -> None:
    assert private_words(text) == []


def test_a_private_word_is_found_on_its_line() -> None:
    assert private_words("one\ntwo\nnobody") == [3]


def test_docstrings_that_begin_with_a_question_word_or_as_are_riddles() -> None:
    program = (
        '"""What waits."""\ndef f():\n    """Whether it waits."""\nclass A:\n    """Whose turn it is."""\n'
        'def g():\n    """As the store has it."""\n'
    )
    assert riddles(program) == [1, 3, 5, 7]
