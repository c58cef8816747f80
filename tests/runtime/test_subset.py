"""A subset of the vocabulary gives a text the same tokens as the whole one, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.real_tokens import STORY, TEXTS
from tests.support.small_host import SENTENCE
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.synth import tokenizer_files
from teneral.runtime.text import subset
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.subset import SubsetTokenizer

SPECIAL = {"eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "no such piece"}
CORPUS = [
    SENTENCE,
    STORY,
    "C'est l'été 蜻蛉 🐉 and 1234 words; x = x ** 2\n" * 5,
    "    def f():\n        return\n",
]
ADDED = [
    AddedToken("<|end|>", special=True),
    AddedToken("<tool>", special=False),
    AddedToken("dragonfly", single_word=True, normalized=True),
    AddedToken("soft", lstrip=True, rstrip=True),
    AddedToken("Ġmoult", normalized=False),
]


def trained(tokenizer: Tokenizer, **options: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens(ADDED)
    return tokenizer


def llama3() -> Tokenizer:
    """Whole words first; a pattern; what begins a text; NFC."""
    tokenizer = gpt()
    tokenizer_json = json.loads(tokenizer.to_str())
    tokenizer_json["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json))
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", pair="<|end|> $A $B", special_tokens=[("<|end|>", end)]
    )
    return tokenizer


def llama2() -> Tokenizer:
    """A tokenizer like SentencePiece's: a text is one word, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(tokenizer, vocab_size=700, special_tokens=special, max_token_length=12)


def unknown() -> Tokenizer:
    """Where what is unknown has a token, and neighbours are one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return trained(tokenizer, vocab_size=300, special_tokens=["<unk>", "<|end|>"], limit_alphabet=30)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt": gpt,
    "llama3": llama3,
    "llama2": llama2,
    "unknown": unknown,
}


def file_of(tokenizer: Tokenizer, *, paired: bool = False) -> dict[str, Any]:
    tokenizer_json: dict[str, Any] = json.loads(tokenizer.to_str())
    merges = tokenizer_json["model"]["merges"]
    tokenizer_json["model"]["merges"] = merges if paired else [" ".join(merge) for merge in merges]
    return tokenizer_json


def both(
    tokenizer_json: dict[str, Any], special_tokens: dict[str, str] = SPECIAL
) -> tuple[SubsetTokenizer, LocalBackend]:
    data = json.dumps(tokenizer_json, ensure_ascii=False).encode()
    with patch.object(subset, "MIN_FILE_BYTES", 0):
        made = SubsetTokenizer.from_file(data, special_tokens)
    assert made is not None
    return made, LocalBackend.from_file(data, special_tokens)


PAIRS = {
    f"{kind}{' paired' * paired}": both(file_of(make(), paired=paired))
    for kind, make in KINDS.items()
    for paired in (False, True)
}
SPICED = st.lists(
    st.one_of(
        TEXTS,
        st.sampled_from(
            ["<|end|>", "<tool>", "dragonfly", " soft  ", " moult", "Ġmoult", "<unk>", "<s>", "<0x0A>", "▁"]
        ),
    )
).map("".join)


@pytest.mark.parametrize("kind", PAIRS)
@settings(max_examples=150, deadline=None)
@given(text=SPICED, add_special_tokens=st.booleans())
def test_a_subset_says_what_the_whole_says(kind: str, text: str, add_special_tokens: bool) -> None:
    part, whole = PAIRS[kind]
    tokens = part.encode(text, add_special_tokens=add_special_tokens)
    expected = whole.encode(text, add_special_tokens=add_special_tokens)
    if tokens is None:  # a piece that is spelt as an added token
        assert any(piece in text.replace(" ", "Ġ") for piece in ("dragonfly", "soft", "Ġmoult"))
        return
    assert tokens == expected
    assert part.offsets(text) == whole.offsets(text)


@pytest.mark.parametrize("kind", PAIRS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_it_decodes_as_the_whole_does(kind: str, data: st.DataObject, skip_special_tokens: bool) -> None:
    part, whole = PAIRS[kind]
    tokens = data.draw(st.lists(st.integers(0, whole.vocab_size + 2), max_size=12))
    expected = whole.decode(tokens, skip_special_tokens=skip_special_tokens)
    assert part.decode(tokens, skip_special_tokens=skip_special_tokens) == expected


@pytest.mark.parametrize("kind", PAIRS)
def test_it_has_the_same_pieces(kind: str) -> None:
    part, whole = PAIRS[kind]
    assert part.vocab_size == whole.vocab_size
    assert dict(part.vocabulary) == whole.tokenizer.get_vocab(with_added_tokens=True)
    for token in range(part.vocab_size + 3):
        assert part.id_to_piece(token) == whole.id_to_piece(token)
    for piece in ("<|end|>", "<tool>", "e", "no such piece", ""):
        assert part.piece_to_id(piece) == whole.piece_to_id(piece)
    added = part.tokenizer.get_added_tokens_decoder()
    assert str(added) == str(whole.tokenizer.get_added_tokens_decoder())
    with pytest.raises(RequestError):
        part.decode([1 << 40], skip_special_tokens=True)


def test_a_vocabulary_in_any_order_is_as_good() -> None:
    tokenizer_json = file_of(gpt())
    tokenizer_json["model"]["vocab"] = dict(reversed(tokenizer_json["model"]["vocab"].items()))
    part, whole = both(tokenizer_json)
    assert part.encode(STORY, add_special_tokens=True) == whole.encode(STORY, add_special_tokens=True)
    assert [part.id_to_piece(token) for token in range(300)] == [
        whole.id_to_piece(token) for token in range(300)
    ]


def test_a_whole_word_that_is_spelt_as_an_added_token_is_left_to_the_whole() -> None:
    """Where whole words come first, the subset would take the added token for one."""
    part, whole = PAIRS["llama3"]
    assert whole.encode(" moult", add_special_tokens=False) != [whole.piece_to_id("Ġmoult")]
    assert part.encode(" moult", add_special_tokens=False) is None
    assert part.encode(" moul", add_special_tokens=False) is not None


def test_a_long_text_is_left_to_the_whole() -> None:
    part, _ = PAIRS["llama2"]
    assert part.encode("word " * 1_000, add_special_tokens=True) is not None
    assert part.encode("word " * 2_000, add_special_tokens=True) is None  # of one long word
    assert part.offsets("word " * 2_000) is None
    part, _ = PAIRS["gpt"]
    assert part.encode("word " * 4_000, add_special_tokens=True) is not None
    assert part.encode("word " * 4_001, add_special_tokens=True) is None


def test_a_real_size_says_the_same() -> None:
    part, whole = both(tokenizer_files(32_000, encoder=False)["tokenizer.json"], {})
    for text in (STORY, "quick brown fox " * 20, ""):
        assert part.encode(text, add_special_tokens=True) == whole.encode(text, add_special_tokens=True)


def change(**changes: Any) -> dict[str, Any]:
    tokenizer_json = file_of(gpt())
    tokenizer_json["model"] |= changes
    return tokenizer_json


OTHERS: dict[str, Any] = {
    "no object": [],
    "no model": {"version": "1.0"},
    "no type": {"model": {"vocab": {}, "merges": []}},
    "word pieces": change(type="WordPiece"),
    "dropout": change(dropout=0.1),
    "prefix": change(continuing_subword_prefix="##"),
    "suffix": change(end_of_word_suffix="</w>"),
    "no vocabulary": change(vocab=None),
    "an empty one": change(vocab={}),
    "no merges": change(merges=None),
    "numbers of their own": file_of(gpt()) | {"added_tokens": [{"content": "<x>", "id": 5_000}]},
    "one character": file_of(gpt()) | {"added_tokens": [{"content": "蜻", "id": 600}]},
    "a byte": file_of(gpt()) | {"added_tokens": [{"content": "<0x0A>", "id": 600}]},
    "unknown": change(unk_token="<x>") | {"added_tokens": [{"content": "<x>", "id": 600}]},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_left_to_the_library(kind: str) -> None:
    with patch.object(subset, "MIN_FILE_BYTES", 0):
        data = json.dumps(OTHERS[kind], ensure_ascii=False).encode()
        assert SubsetTokenizer.from_file(data, {}) is None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, "{}".encode("utf-16")])
def test_what_is_no_json_is_left_to_the_library(data: bytes) -> None:
    with patch.object(subset, "MIN_FILE_BYTES", 0):
        assert SubsetTokenizer.from_file(data, {}) is None


def test_small_files_are_left_to_the_library() -> None:
    assert SubsetTokenizer.from_file(json.dumps(file_of(gpt())).encode(), {}) is None


def test_what_the_library_refuses_is_refused() -> None:
    tokenizer_json = file_of(gpt()) | {"pre_tokenizer": {"type": "Absurd"}}
    with patch.object(subset, "MIN_FILE_BYTES", 0), pytest.raises(ModelError, match="cannot be read"):
        SubsetTokenizer.from_file(json.dumps(tokenizer_json, ensure_ascii=False).encode(), {})
