"""One token alone as bytes: spaces kept, parts of characters as they are."""

from __future__ import annotations

import pytest
from tests.support.instances import TinyParts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from teneral.handlers.openai.logprobs import token_bytes
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.settings import TextSettings
from teneral.runtime.text.tokenizer import TextTokenizer


@pytest.mark.parametrize("text", ["hello world", "naïve café", "日本語", "🙂 ok", "\n\ttab", "\x00\x7f\xad"])
def test_the_tokens_of_a_text_are_its_bytes(tiny_parts: TinyParts, text: str) -> None:
    tokenizer = tiny_parts.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, token) for token in tokens) == text.encode()


def test_a_special_token_is_its_name(tiny_parts: TinyParts) -> None:
    assert token_bytes(tiny_parts.tokenizer, 256) == b"<|end|>"


def test_a_token_that_the_tokenizer_lacks_is_nothing(tiny_parts: TinyParts) -> None:
    assert token_bytes(tiny_parts.tokenizer, 319) == b""


@pytest.fixture
def with_byte_fallback() -> TextTokenizer:
    """A tokenizer like SentencePiece's: a sign for spaces, and single bytes for what has no piece."""
    pieces = ["<unk>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(LocalBackend(backend, {}), TextSettings({}, {}, frozenset()))


def test_a_word_keeps_its_space_and_a_byte_stays_a_byte(with_byte_fallback: TextTokenizer) -> None:
    tokens = {"▁the": b" the", "▁cat": b" cat", "s": b"s", "<0xE2>": b"\xe2", "<0x0A>": b"\n"}
    for piece, data in tokens.items():
        token = with_byte_fallback.piece_to_id(piece)
        assert token is not None
        assert token_bytes(with_byte_fallback, token) == data
