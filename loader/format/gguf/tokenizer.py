"""The vocabulary in a GGUF file → the tokenizer files of a model directory.

`tokenizer.ggml.model` is `gpt2` for byte-level BPE, whose splitting of text has a name in
`tokenizer.ggml.pre`, and `llama` for SentencePiece's BPE, whose merges follow from the pieces'
scores; `gemma4` is the same with merges. Other kinds, and splittings that are not known here, are
refused by name: guessing would give other tokens without a word. tokenizer.json is spelt as the
`tokenizers` library writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .fields import GgufFields

MAX_PIECE_CHARS = 4096
# Of all halves of all pieces, from which merges are found; Gemma's take 1 << 25.
MAX_SPLIT_CHARS = 1 << 29

_HARMONY_ENDS, _HARMONY_END_OF_MESSAGE = ("<|return|>", "<|call|>"), "<|end|>"

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN_35 = _QWEN_2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
_NFC = {"type": "NFC"}
# `tokenizer.ggml.pre` → how text is split, the normalizer, and whether a whole piece needs no
# merges
_SPLITS: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, bool]] = {
    "gpt-2": ([_byte_level(use_regex=True)], None, False),
    "smollm": ([_DIGITS, _byte_level(use_regex=True)], None, False),
    "refact": ([_DIGITS, _byte_level(use_regex=True)], None, False),
    "llama-bpe": (_split(_LLAMA_3), None, True),
    "falcon-h1": (_split(_LLAMA_3), None, True),
    "dbrx": (_split(_LLAMA_3), None, False),
    "qwen2": (_split(_QWEN_2), _NFC, False),
    "qwen35": (_split(_QWEN_35), _NFC, False),
    "deepseek-r1-qwen": (_split(_QWEN_2), _NFC, False),
    "gpt-4o": (_split(_GPT_4O), None, False),
    "llama4": (_split(_GPT_4O), None, False),
    "tekken": (_split(_TEKKEN), None, True),
}


def tokenizer_files(fields: GgufFields, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, by their names.

    `vocab_size` is the number of rows of the embeddings. Raises `CheckpointError`.
    """
    pieces = _pieces(fields, vocab_size)
    kinds = [int(kind) for kind in fields.numbers("tokenizer.ggml.token_type", len(pieces))]
    model = fields.text("tokenizer.ggml.model")
    if model == "gpt2":
        document, is_opened = _byte_level_bpe(fields, pieces)
    elif model in ("llama", "gemma4"):
        document, is_opened = _sentence_pieces(fields, pieces, kinds, has_merges=model == "gemma4"), True
    else:
        raise fields.wrong(
            f"the vocabulary is of kind {model[:40]!r}, which is not supported",
            hint="Supported are gpt2 (byte-level BPE), llama and gemma4 (SentencePiece). Pack the original model.",
        )
    special = {
        name: pieces[token]
        for name, token in _special_tokens(fields, len(pieces)).items()
        if token is not None
    }
    begins = fields.boolean("tokenizer.ggml.add_bos_token", is_opened) and "bos_token" in special
    ends = fields.boolean("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    document["added_tokens"] = _added_tokens(pieces, kinds)
    document["post_processor"] = _around(
        special["bos_token"] if begins else None, special["eos_token"] if ends else None, pieces
    )
    settings = {**special, "add_bos_token": begins, "add_eos_token": ends, **_templates(fields)}
    return {
        "tokenizer.json": _dump(document),
        "tokenizer_config.json": _dump(settings),
        "generation_config.json": _dump(_generation(fields, pieces)),
    }


def _pieces(fields: GgufFields, vocab_size: int) -> list[str]:
    pieces = fields.texts("tokenizer.ggml.tokens")
    if not 0 < len(pieces) <= vocab_size:
        raise fields.wrong(
            f"the vocabulary has {len(pieces)} tokens, but the embeddings have {vocab_size} rows"
        )
    if max(map(len, pieces)) > MAX_PIECE_CHARS:
        raise fields.wrong(f"a token has more than {MAX_PIECE_CHARS} characters")
    if len(set(pieces)) != len(pieces):
        seen: set[str] = set()
        twice = next(piece for piece in pieces if piece in seen or seen.add(piece))  # type: ignore[func-returns-value]
        raise fields.wrong(f"the token {twice[:60]!r} occurs twice in the vocabulary")
    return pieces


def _byte_level_bpe(fields: GgufFields, pieces: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The document, and whether texts open with the first token by default."""
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise fields.wrong(
            f"text is split by the rules {name[:40]!r}, which are not supported",
            hint=f"Supported are {', '.join(sorted(_SPLITS))}. Pack the original model, which has a tokenizer.json.",
        )
    steps, normalizer, ignores_merges = _SPLITS[name]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = _bpe(vocabulary, _stated_merges(fields, vocabulary)) | {"ignore_merges": ignores_merges}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    splitter = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    return _document(normalizer, splitter, decoder, model), name in ("llama-bpe", "falcon-h1")


def _stated_merges(fields: GgufFields, vocabulary: dict[str, int]) -> list[list[str]]:
    merges = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise fields.wrong(f"the merge {merge[:60]!r} is not of tokens of the vocabulary")
        merges.append([left, right])
    return merges


def _sentence_pieces(
    fields: GgufFields, pieces: Sequence[str], kinds: Sequence[int], *, has_merges: bool
) -> dict[str, Any]:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = replace
    if fields.boolean("tokenizer.ggml.add_space_prefix", not has_merges):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _UNKNOWN), None)
    if unknown is None and (token := _token(fields, "unknown", len(pieces))) is not None:
        unknown = pieces[token]  # a control token, in Gemma 4's files
    if has_merges:
        merges = _stated_merges(fields, vocabulary)
    else:
        merges = _merges_of(fields, vocabulary, fields.numbers("tokenizer.ggml.scores", len(pieces)))
    model = _bpe(vocabulary, merges) | {
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return _document(normalizer, None, {"type": "Sequence", "decoders": decoders}, model)


def _merges_of(fields: GgufFields, vocabulary: dict[str, int], scores: Sequence[float]) -> list[list[str]]:
    """All pairs of pieces that make a piece: the best scores first, then the earliest halves."""
    if sum(len(piece) ** 2 for piece in vocabulary) > MAX_SPLIT_CHARS:
        raise fields.wrong("its tokens are too long to find merges for")
    found = [
        (-scores[index], vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
        for piece, index in vocabulary.items()
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    found.sort(key=lambda merge: (merge[0], merge[1], merge[2]))
    return [[left, right] for _, _, _, left, right in found]


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """The keys in the library's order: vocabulary and merges last."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _document(normalizer: Any, pre_tokenizer: Any, decoder: Any, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _added_tokens(pieces: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and piece
    ]


def _around(begin: str | None, end: str | None, pieces: list[str]) -> dict[str, Any] | None:
    """The special tokens around each text, where there are any."""
    if begin is None and end is None:
        return None

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        around = [
            None if text is None else {"SpecialToken": {"id": text, "type_id": number}}
            for text in (begin, end)
        ]
        parts = [around[0], {"Sequence": {"id": name, "type_id": number}}, around[1]]
        return [part for part in parts if part is not None]

    tokens = {
        text: {"id": text, "ids": [pieces.index(text)], "tokens": [text]}
        for text in (begin, end)
        if text is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": tokens,
    }


def _special_tokens(fields: GgufFields, num_pieces: int) -> dict[str, int | None]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {name: _token(fields, key, num_pieces) for name, key in keys.items()}


def _token(fields: GgufFields, key: str, num_pieces: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    return fields.integer(name, 0, num_pieces - 1) if name in fields else None


def _generation(fields: GgufFields, pieces: Sequence[str]) -> dict[str, Any]:
    ends = [_token(fields, key, len(pieces)) for key in ("eos", "eot", "eom")]
    if all(
        piece in pieces for piece in _HARMONY_ENDS
    ):  # no key names the end of a call, and <|end|> ends no answer
        ends = [token for token in ends if token is not None and pieces[token] != _HARMONY_END_OF_MESSAGE]
        ends += [pieces.index(piece) for piece in _HARMONY_ENDS]
    first = _token(fields, "bos", len(pieces))
    ids = list(dict.fromkeys(token for token in ends if token is not None))
    return ({} if first is None else {"bos_token_id": first}) | ({"eos_token_id": ids} if ids else {})


def _templates(fields: GgufFields) -> dict[str, Any]:
    """The chat templates, as tokenizer_config.json has them: one text, or several with names."""
    key = "tokenizer.chat_template"
    if key not in fields:
        return {}
    default = fields.text(key)
    names = fields.texts(f"{key}s") if f"{key}s" in fields else []
    others = [
        {"name": name, "template": fields.text(f"{key}.{name}")}
        for name in names
        if f"{key}.{name}" in fields
    ]
    if not others:
        return {"chat_template": default}
    return {"chat_template": [{"name": "default", "template": default}, *others]}


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
