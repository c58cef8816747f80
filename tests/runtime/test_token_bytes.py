"""The bound on bytes a token holds for every text, and is there only where it does."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.pieces import NFC_FACTOR

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(normalizer: Any = None, **model: Any) -> Tokenizer:
    pieces = [*ALPHABET, "xx", "xxxx"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("x", "x"), ("xx", "xx")],
            **model,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "▁", "x", "xx", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("x", "x")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def read(tokenizer: Tokenizer) -> LocalBackend:
    return LocalBackend.from_file(tokenizer.to_str().encode(), {})


TOKENIZERS = {
    "bytes": byte_level(),
    "bytes in NFC": byte_level(normalizers.NFC()),
    "byte fallback": with_byte_fallback(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("x xé\u0301\u0308ι\u0390\u212a\u1fef\u1100\u1161\u11a8\U0001d15e")))
def test_no_token_stands_for_more_bytes(name: str, text: str) -> None:
    backend = read(TOKENIZERS[name])
    assert backend.max_token_bytes is not None
    tokens = backend.encode(text, add_special_tokens=False)
    assert len(text.encode()) <= len(tokens) * backend.max_token_bytes


def test_the_bound_is_the_longest_piece() -> None:
    assert read(byte_level()).max_token_bytes == 4
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|a long one|>")])
    assert read(tokenizer).max_token_bytes == len("<|a long one|>")


def test_composing_shortens_no_text_by_more() -> None:
    for code in (0x390, 0x3B0, 0x1F82, 0x1FE7, 0xAC01, 0x1D15E):
        composed = unicodedata.normalize("NFC", chr(code))
        decomposed = unicodedata.normalize("NFD", composed)
        assert len(decomposed.encode()) <= NFC_FACTOR * len(composed.encode())


def without_a_byte() -> Tokenizer:
    pieces = ALPHABET[1:]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizers.NFKC()),
        byte_level(normalizers.Replace("  ", " ")),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        stripping(),
        removing(),
        without_a_byte(),
        Tokenizer(models.BPE(vocab={"x": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)),
        Tokenizer(models.WordPiece(vocab={"x": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
)
def test_there_is_none_where_text_may_be_dropped(tokenizer: Tokenizer) -> None:
    assert read(tokenizer).max_token_bytes is None


def test_a_file_of_another_shape_has_none() -> None:
    file = json.loads(byte_level().to_str())
    file["added_tokens"] = [{"id": 400, "content": "x", "special": True, "single_word": False}]
    from teneral.runtime.text.pieces import max_token_bytes

    assert max_token_bytes(file, 4, lambda _: True) is None
