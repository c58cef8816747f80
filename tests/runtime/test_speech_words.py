"""Times of words: the alignment and the words are transformers'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from teneral.runtime.speech.windows import SpokenSegment
from teneral.runtime.speech.words import token_ends, words_of

TIMES_FROM = 300


def shares_of(seed: int, num_heads: int, num_tokens: int, num_places: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    powers = np.exp(2 * random.standard_normal((num_heads, num_tokens, num_places))).astype(np.float32)
    return powers / powers.sum(axis=-1, keepdims=True)


def expected_ends(shares: np.ndarray, num_places: int, width: int) -> list[float]:
    """The ends of tokens that transformers finds by the same attention, in seconds."""
    model: Any = SimpleNamespace(config=SimpleNamespace(decoder_layers=1, median_filter_width=width))
    made = WhisperGenerationMixin._extract_token_timestamps(
        model,
        Outputs([(torch.tensor(shares)[None],)]),
        [(0, head) for head in range(len(shares))],
        num_frames=torch.tensor([2 * num_places]),
        num_input_ids=0,
    )
    return made[0].tolist()[:-1]


class Outputs(dict[str, Any]):
    """A generation's outputs, by attribute, too."""

    def __init__(self, cross_attentions: Any) -> None:
        super().__init__()
        self.cross_attentions = cross_attentions
        self.sequences = torch.zeros(1, 1, dtype=torch.int64)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_heads=st.integers(1, 3),
    num_tokens=st.integers(3, 12),  # of two, sums are equal too often
    num_places=st.integers(1, 40),
    width=st.sampled_from([1, 3, 7]),
)
def test_tokens_end_where_transformers_has_them(
    seed: int, num_heads: int, num_tokens: int, num_places: int, width: int
) -> None:
    shares = shares_of(seed, num_heads, num_tokens, 40)
    ends = token_ends(list(shares), num_places, width)
    expected = expected_ends(shares, num_places, width)
    np.testing.assert_allclose([0.02 * place for place in ends], np.maximum(expected, 0), atol=1e-6)


def test_one_token_alone_ends_at_the_beginning() -> None:
    assert token_ends(list(shares_of(0, 2, 1, 20)), 20, 7) == [0]


TEXTS = [
    " Hello,",
    " (",
    "world",
    ")",
    " ",
    "naïve",
    " “quoted",
    "”",
    "!",
    " don",
    "'t",
    " 日本",
    "語",
    "。",
    " x",
]


class Pieces:
    """A tokenizer of bytes, as models of speech decode."""

    eos_token_id = 256
    language = None

    def decode(self, tokens: Any, **options: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("text", ["".join(TEXTS), " a", "a\ufffdb, c", " ( ( a ) ).", "日本語、"])
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    tokens = list(text.encode())
    names = {"en": "english", "ja": "japanese"}
    words, _, places = _combine_tokens_into_words(Pieces(), tokens, names[language])
    expected = [
        (word.strip(), float(own[0]), own[-1] + 1.0)
        for word, own in zip(words, places, strict=True)
        if word.strip()
    ]
    segment = SpokenSegment(0, 1, (TIMES_FROM, *tokens, TIMES_FROM + 9), 0)
    ends = [0.0, *(float(place) for place in range(len(tokens) + 1)), 99.0]
    assert words_of(segment, ends, TIMES_FROM, Pieces().decode, language) == expected
