"""A table decodes exactly as the library does, whatever tokens come, or there is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.small_host import small_backend
from tokenizers import AddedToken, Tokenizer, decoders, models

from teneral.runtime.text.pieces import PieceTable, byte_alphabet, make_piece_table


def byte_level() -> Tokenizer:
    tokenizer = small_backend(texts=("C'est l'été 蜻蛉 🐉 and some words\n" * 5,), vocab_size=400)
    # Added tokens whose text is, and is not, of characters that stand for bytes; spaces and controls are none.
    tokenizer.add_tokens(["<plain>", "Ġspelt", "two words", "tab\t", "蜻", "\u00ad", "Ā"])
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True)])
    return tokenizer


def sentencepiece(*, strip: bool) -> Tokenizer:
    words = ["<unk>", "<s>", "▁", "▁wing", "s", "▁▁", "soft", "é", "蜻"]
    pieces = words + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: rank for rank, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def table_of(tokenizer: Tokenizer) -> PieceTable | None:
    special = frozenset(
        token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special
    )
    return make_piece_table(json.loads(tokenizer.decoder.__getstate__()), tokenizer.get_vocab(), special)


KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(strip=True),
    "sentencepiece without strip": sentencepiece(strip=False),
}
TABLES = {kind: table_of(tokenizer) for kind, tokenizer in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_a_table_decodes_as_the_library_does(
    kind: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    tokenizer, table = KINDS[kind], TABLES[kind]
    assert table is not None
    size = tokenizer.get_vocab_size() + 3  # the last ones are no tokens
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    expected = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    assert table.decode(tokens, skip_special_tokens=skip_special_tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_alone_decodes_as_the_library_does(kind: str) -> None:
    tokenizer, table = KINDS[kind], TABLES[kind]
    assert table is not None
    for token in range(tokenizer.get_vocab_size()):
        assert table.decode([token], skip_special_tokens=False) == tokenizer.decode(
            [token], skip_special_tokens=False
        )


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 1, 0)]
        ),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_other_decoders_have_no_table(decoder: object) -> None:
    state = json.loads(decoder.__getstate__())
    assert make_piece_table(state, {"a": 0}, frozenset()) is None


@pytest.mark.parametrize(
    "decoder", [None, {}, [], "ByteLevel", {"type": "Sequence"}, {"type": "Sequence", "decoders": [1]}]
)
def test_what_is_no_decoder_has_no_table(decoder: object) -> None:
    assert make_piece_table(decoder, {"a": 0}, frozenset()) is None


def test_the_byte_alphabet_has_a_character_for_every_byte() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
