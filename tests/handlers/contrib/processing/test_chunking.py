"""Chunks cover the text in order, within their bounds, and lie where they lie however the text came."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.inspection import held_by
from tests.support.real_tokens import STORY, TEXTS, TOKENIZERS
from tests.support.small_host import SENTENCE

from teneral.handlers.contrib.processing import Chunker, achunks, chunks
from teneral.handlers.contrib.processing.chunking import MAX_PIECE_CHARS
from teneral.runtime.errors import RequestError


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS, max_tokens=st.integers(24, 80), share=st.floats(0, 0.5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_cover_the_text_in_order_and_within_their_bounds(kind, text, max_tokens, share, data):
    tokens = TOKENIZERS[kind]
    special = len(tokens.tokenize(""))
    overlap = int((max_tokens - special) * share)
    found = list(chunks(tokens, text, max_tokens=max_tokens, overlap_tokens=overlap))
    covered = 0
    for index, chunk in enumerate(found):
        assert chunk.text == text[chunk.start : chunk.end]
        assert chunk.num_tokens == len(tokens.tokenize(chunk.text)) - special
        assert len(tokens.tokenize(chunk.text)) <= max_tokens
        assert chunk.start <= covered < chunk.end
        if index:
            assert chunk.start > found[index - 1].start
            assert len(tokens.token_offsets(text[chunk.start : covered])) <= overlap
        covered = chunk.end
    assert covered == len(text)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert list(chunks(tokens, pieces, max_tokens=max_tokens, overlap_tokens=overlap)) == found


class Capricious:
    """Tokens of two characters in texts of even length, else of one: shorter texts may have more tokens."""

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        step = 2 if len(text) % 2 == 0 else 1
        return [(start, min(start + step, len(text))) for start in range(0, len(text), step)]

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * len(self.token_offsets(text))


@given(
    text=st.text(alphabet="ab. \n", max_size=200), max_tokens=st.integers(2, 20), overlap=st.integers(0, 10)
)
@settings(max_examples=200, deadline=None)
def test_the_bound_holds_even_where_a_shorter_text_has_more_tokens(text, max_tokens, overlap):
    overlap = min(overlap, max_tokens // 2)
    found = list(chunks(Capricious(), text, max_tokens=max_tokens, overlap_tokens=overlap))
    assert all(len(Capricious().tokenize(chunk.text)) <= max_tokens for chunk in found)
    covered = 0
    for chunk in found:
        assert chunk.start <= covered < chunk.end
        covered = chunk.end
    assert covered == len(text)


def test_chunks_of_long_words_are_full_too():
    tokens = TOKENIZERS["word pieces"]
    found = list(chunks(tokens, "dragonflies " * 100, max_tokens=20))
    assert {chunk.num_tokens for chunk in found[:-1]} == {20}
    assert len(found[0].text) == 20 * len("dragonflies ")


def test_an_empty_text_has_no_chunks():
    assert list(chunks(TOKENIZERS["byte level"], "", max_tokens=10)) == []


def test_cuts_lie_between_paragraphs_where_these_fit():
    tokens = TOKENIZERS["byte level"]
    paragraphs = STORY.split("\n\n")
    room = max(len(tokens.tokenize(f"{paragraph}\n\n")) for paragraph in paragraphs) + 2
    found = list(chunks(tokens, STORY, max_tokens=room))
    assert [chunk.text.strip() for chunk in found] == [paragraph.strip() for paragraph in paragraphs]


def test_cuts_lie_behind_sentences_where_paragraphs_do_not_fit():
    tokens = TOKENIZERS["byte level"]
    text = "It flies. " * 40
    for chunk in chunks(tokens, text, max_tokens=25):
        assert chunk.text.endswith("It flies. ")


def test_chunks_without_any_edge_are_full():
    tokens = TOKENIZERS["byte level"]
    found = list(chunks(tokens, "ABCDEFGHIJ" * 30, max_tokens=21))
    assert {chunk.num_tokens for chunk in found[:-1]} == {20}


def test_the_overlap_is_as_long_as_it_may_be_where_there_is_no_edge():
    found = list(chunks(TOKENIZERS["byte level"], "QZXJ" * 50, max_tokens=21, overlap_tokens=5))
    assert {before.end - after.start for before, after in pairwise(found)} == {5}


def test_no_more_of_the_text_is_read_than_the_next_chunk_needs():
    read = []

    def lines():
        for number in range(10_000):
            read.append(number)
            yield STORY

    next(chunks(TOKENIZERS["byte level"], lines(), max_tokens=40))
    assert len(read) < 10


def test_what_is_held_is_bounded():
    chunker = Chunker(TOKENIZERS["byte level"], max_tokens=50)
    most = 0
    for _ in range(50):
        for _ in chunker.feed(STORY * 30):
            most = max(most, len(held_by(chunker)))
    assert most < 2 * MAX_PIECE_CHARS
    assert list(chunker.finish())


async def test_an_async_handler_chunks_what_comes(context):
    text = SENTENCE * 40

    async def pieces():
        for start in range(0, len(text), 100):
            yield text[start : start + 100]

    expected = list(chunks(TOKENIZERS["byte level"], text, max_tokens=30))
    assert [chunk async for chunk in achunks(TOKENIZERS["byte level"], pieces(), max_tokens=30)] == expected
    own = [chunk async for chunk in achunks(context.model, text, max_tokens=30)]
    assert own == [chunk async for chunk in achunks(context.model, [text], max_tokens=30)]
    assert "".join(chunk.text for chunk in own) == text


@pytest.mark.parametrize(("max_tokens", "overlap"), [(1, 0), (0, 0), (-5, 0), (21, 11), (21, -1)])
def test_invalid_sizes_are_refused(max_tokens, overlap):
    with pytest.raises(RequestError):
        list(chunks(TOKENIZERS["byte level"], "text", max_tokens=max_tokens, overlap_tokens=overlap))


def test_a_character_that_no_chunk_can_hold_is_an_error():
    with pytest.raises(RequestError, match="one character"):
        list(chunks(TOKENIZERS["byte level"], "a🐉", max_tokens=3))
