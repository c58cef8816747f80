"""Texts and pairs of them as an encoder's tokens: token types, lowercasing, and how they are shortened."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from teneral.runtime.errors import ContextLengthError, ModelError
from teneral.runtime.text.backend import SPECIAL, EncodedPair
from teneral.runtime.text.tokenizer import TextTokenizer

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


def save_bert_tokenizer(directory: Path, **settings: Any) -> None:
    """A cased vocabulary with BERT's template for pairs, and this tokenizer_config.json."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "One", "one", "two", "Ünder", "ünder"]
    tokenizer = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))


def tokenizer_of(directory: Path) -> TextTokenizer:
    return TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := directory / name).exists() else None
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizerFast"},
        {"tokenizer_class": "ElectraTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "DistilBertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        },
    ],
)
def test_a_pair_has_the_token_types_that_transformers_gives_the_model(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    save_bert_tokenizer(tmp_path, **settings)
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path)("One two", "two")
    (pair,) = tokenizer_of(tmp_path).encode_pairs([("One two", "two")])
    types = inputs.get("token_type_ids", [0] * len(inputs["input_ids"]))
    assert pair.types == tuple(types)


@pytest.mark.parametrize("own", [None, normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC()])])
def test_texts_are_lowercased_as_sentence_transformers_does(
    tmp_path: Path, own: normalizers.Normalizer | None
) -> None:
    """Its normalizer comes first, and special tokens keep their spelling."""
    save_bert_tokenizer(tmp_path)
    if own is not None:
        changed = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        changed.normalizer = own
        changed.save(str(tmp_path / "tokenizer.json"))
    text = "One [MASK] Ünder [SEP]"
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False}))
    is_lower = isinstance(own, normalizers.Lowercase)
    assert tokenizer_of(tmp_path).encode(text) == [1, *((6, 4, 9) if is_lower else (5, 4, 8)), 2, 2]
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert tokenizer_of(tmp_path).encode(text) == [1, 6, 4, 9, 2, 2]


def test_a_do_lower_case_that_is_not_a_boolean_is_refused(tmp_path: Path) -> None:
    save_bert_tokenizer(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": "yes"}))
    with pytest.raises(ModelError, match="do_lower_case is 'yes'"):
        tokenizer_of(tmp_path)
