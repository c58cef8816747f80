"""A byte-level BPE tokenizer of any vocabulary size, made without text, for models with random
weights.

Its merges join any two, then any three, common characters, so every text becomes tokens of up to
three characters and decodes to itself; its file is as large, and loads as slowly, as a real
tokenizer of the same size.
"""

from __future__ import annotations

import itertools
import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

SPACE = "Ġ"  # a space in byte-level tokenizers
COMMON = SPACE + string.ascii_letters + string.digits
END = "<|end|>"
START_TURN = "<|turn|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + START_TURN
    + "{{ message['role'] }}\n{{ message['content'] }}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}"
    + START_TURN
    + "assistant\n{% endif %}"
)


def tokenizer_files(vocab_size: int, *, encoder: bool) -> dict[str, Any]:
    """`tokenizer.json` and `tokenizer_config.json` as JSON values, and under "special_ids" the ids
    for config.json.
    """
    specials = ["[PAD]", "[CLS]", "[SEP]"] if encoder else [END, START_TURN]
    words = list(specials) if encoder else []
    words += sorted(ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), vocab_size - len(words) - (0 if encoder else len(specials))))
    words += [left + right for left, right in merges]
    if not encoder:
        words += specials
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[word], "content": word, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for word in specials
        ],
        "normalizer": None,
        "pre_tokenizer": _byte_level(),
        "post_processor": _cls_and_sep(ids) if encoder else None,
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if encoder:
        settings |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        special_ids = {"pad_token_id": ids["[PAD]"]}
    else:
        settings |= {"eos_token": END, "chat_template": CHAT_TEMPLATE}
        special_ids = {"eos_token_id": ids[END]}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "special_ids": special_ids}


def _merges() -> Any:
    """Pairs of common characters, then any pair with a third."""
    pairs = [left + right for left, right in itertools.product(COMMON, COMMON)]
    yield from itertools.product(COMMON, COMMON)
    yield from itertools.product(pairs, COMMON)


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _cls_and_sep(ids: dict[str, int]) -> dict[str, Any]:
    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    def sequence(name: str) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": [special("[CLS]"), sequence("A"), special("[SEP]")],
        "pair": [special("[CLS]"), sequence("A"), special("[SEP]"), sequence("B"), special("[SEP]")],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
        },
    }
