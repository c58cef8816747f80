from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.real_tokens import STORY, TEXTS, TOKENIZERS

from teneral.handlers.contrib.processing import acount_tokens, atruncate, count_tokens, truncate
from teneral.runtime.errors import RequestError
from teneral.runtime.text.tokenizer import MAX_TEXT_CHARS


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS, max_tokens=st.integers(2, 60))
@settings(max_examples=60, deadline=None)
def test_what_was_truncated_is_a_beginning_that_fits(kind, text, max_tokens):
    tokens = TOKENIZERS[kind]
    cut = truncate(tokens, text, max_tokens)
    assert text.startswith(cut)
    assert count_tokens(tokens, cut) <= max_tokens
    if count_tokens(tokens, text) <= max_tokens:
        assert cut == text


@pytest.mark.parametrize("kind", ["byte level", "word pieces"])
def test_a_text_is_cut_to_exactly_as_many_tokens(kind):
    tokens = TOKENIZERS[kind]
    for max_tokens in range(3, 30):
        assert count_tokens(tokens, truncate(tokens, STORY, max_tokens)) == max_tokens


def test_a_long_word_is_not_cut_by_what_was_looked_at_first():
    for length in range(1, 300):
        text = f"{' ' * length} dragonfly dragonfly dragonfly"
        for tokens in TOKENIZERS.values():
            num_tokens = count_tokens(tokens, text)
            assert truncate(tokens, f"{text} dragonfly flies" * 3, num_tokens).startswith(text)


def test_special_tokens_may_be_left_to_others():
    tokens = TOKENIZERS["byte level"]
    assert count_tokens(tokens, "") == 1
    cut = truncate(tokens, STORY, 10, add_special_tokens=False)
    assert count_tokens(tokens, cut, add_special_tokens=False) == 10
    assert truncate(tokens, STORY, 0, add_special_tokens=False) == ""


def test_a_text_of_any_length_can_be_cut():
    tokens = TOKENIZERS["byte level"]
    assert count_tokens(tokens, truncate(tokens, STORY * (2 * MAX_TEXT_CHARS // len(STORY)), 100)) == 100


def test_no_room_after_the_special_tokens_is_an_error():
    with pytest.raises(RequestError) as caught:
        truncate(TOKENIZERS["byte level"], STORY, 1)
    assert caught.value.param == "max_tokens"


async def test_async_handlers_count_and_cut(context):
    assert await acount_tokens(context.model, "a b") == len(await context.model.atokenize("a b"))
    assert await acount_tokens(context.model, await atruncate(context.model, STORY, 7)) == 7


async def test_a_model_tells_which_characters_its_tokens_stand_for(context):
    text = " café 🐉"
    spans = await context.model.atoken_offsets(text)
    assert len(spans) == len(await context.model.atokenize(text, add_special_tokens=False))
    assert (spans[0][0], spans[-1]) == (0, (6, 7))
