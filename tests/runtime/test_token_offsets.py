"""Token offsets: the same from a tokenizer in this process and from one in another."""

from __future__ import annotations

import pytest
from tests.runtime.test_tokenizer_process import TEXTS, folder, local, remote  # noqa: F401 - the last three are fixtures

from teneral.runtime.errors import RequestError
from teneral.runtime.text.tokenizer import MAX_TEXT_CHARS, TextTokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_has_its_characters(local: TextTokenizer, remote: TextTokenizer, text: str):  # noqa: F811
    offsets = local.offsets(text)
    assert offsets == remote.offsets(text)
    tokens = local.encode(text, add_special_tokens=False)
    # The tiny models have a token a byte: each stands for the character that its byte is of.
    places = [index for index, character in enumerate(text) for _ in character.encode()]
    assert offsets == [(place, place + 1) for place in places]
    assert len(offsets) == len(tokens)


@pytest.mark.parametrize("text", ["x" * (MAX_TEXT_CHARS + 1), "\ud800"])
def test_a_text_that_cannot_be_tokenised_is_refused(local: TextTokenizer, text: str):  # noqa: F811
    with pytest.raises(RequestError):
        local.offsets(text)
