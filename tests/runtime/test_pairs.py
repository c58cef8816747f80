"""Pairs of texts as tokens, and how they are shortened."""

import pytest

from teneral.runtime.errors import ContextLengthError
from teneral.runtime.text.backend import SPECIAL, EncodedPair

# [CLS] a a a [SEP] b b b b [SEP]
PAIR = EncodedPair(
    (1, 10, 11, 12, 2, 20, 21, 22, 23, 2),
    (0, 0, 0, 0, 0, 1, 1, 1, 1, 1),
    (SPECIAL, 0, 0, 0, SPECIAL, 1, 1, 1, 1, SPECIAL),
)


@pytest.mark.parametrize(
    ("most", "tokens"),
    [
        (10, PAIR.tokens),
        (9, (1, 10, 11, 12, 2, 20, 21, 22, 2)),
        (6, (1, 10, 11, 12, 2, 2)),
        (5, (1, 10, 11, 2, 2)),
        (3, (1, 2, 2)),
    ],
)
def test_the_second_text_is_shortened_first_and_special_tokens_stay(
    most: int, tokens: tuple[int, ...]
) -> None:
    kept = PAIR.within(most)
    assert kept.tokens == tokens
    assert [kind for token, kind in zip(tokens, kept.types, strict=True) if token >= 10] == [
        int(token >= 20) for token in tokens if token >= 10
    ]


def test_special_tokens_alone_may_be_too_many() -> None:
    with pytest.raises(ContextLengthError, match="3 special"):
        PAIR.within(2)


def test_one_text_has_a_bound_of_its_own() -> None:
    assert PAIR.with_part(1, 2).tokens == (1, 10, 11, 12, 2, 20, 21, 2)
    assert PAIR.with_part(0, 0).tokens == (1, 2, 20, 21, 22, 23, 2)
    assert PAIR.with_part(1, 4) is PAIR
