"""Entries looked up in the file as it lies there are those of reading all of it as JSON, or the
file is refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from teneral.runtime.synth import tokenizer_files
from teneral.runtime.text.vocabulary import UnusualFileError, Vocabulary

STYLES: dict[str, dict[str, Any]] = {
    "indented": {"indent": 2},
    "close": {"separators": (",", ":")},
    "spaced": {},
    "tabs": {"indent": "\t\t\t\t\t"},
}
AWKWARD = [
    "",
    '"',
    "\\",
    '\\"',
    '"}, "merges": [',
    "vocab",
    "merges",
    '{"vocab": {',
    "\\\\",
    "\n",
    "\x00",
    "\x1f",
    "\x7f",
    "\\u",
    "é",
    "Ġ",
    "蜻蛉",
    "🐉",
    "\u2028",
    "a" * 8,
    "a" * 9,
    "a" * 7 + "b" + "a" * 8,
    "a" * 7 + "c" + "a" * 8,
]
PIECES = st.one_of(st.sampled_from(AWKWARD), st.text(max_size=20))


def written(
    vocab: dict[str, int], merges: list[Any], *, style: str = "spaced", before: dict[str, Any] | None = None
) -> bytes:
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    tokenizer_json = {"version": "1.0", **(before or {}), "model": model}
    return json.dumps(tokenizer_json, ensure_ascii=False, **STYLES[style]).encode()


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(PIECES, min_size=2, max_size=30, unique=True),
    others=st.lists(PIECES, max_size=10),
    style=st.sampled_from(sorted(STYLES)),
    data=st.data(),
)
def test_it_says_what_the_file_says(
    pieces: list[str], others: list[str], style: str, data: st.DataObject
) -> None:
    tokens = data.draw(
        st.lists(st.integers(0, 9_999_999), min_size=len(pieces), max_size=len(pieces), unique=True)
    )
    vocab = dict(zip(pieces, tokens, strict=True))
    pairs = data.draw(
        st.lists(st.tuples(*[st.sampled_from(pieces)] * 2), min_size=1, max_size=20, unique=True)
    )
    is_paired = data.draw(st.booleans())
    if not is_paired:  # which of two spaces is the cut is unknown
        pairs = [pair for pair in pairs if not any(" " in side for side in pair)] or [("a", "b")]
    found = Vocabulary(
        written(vocab, pairs if is_paired else [" ".join(pair) for pair in pairs], style=style)
    )
    assert len(found) == len(vocab)
    assert found.as_dict() == vocab
    assert found.longest >= max(map(len, vocab))
    assert found.tokens_of({*pieces, *others}) == vocab | {
        other: vocab[other] for other in others if other in vocab
    }
    assert found.tokens_of([]) == {}
    assert {token: found.piece_of(token) for token in (*tokens, 10_000_000, -1)} == {
        **{token: piece for piece, token in vocab.items()},
        10_000_000: None,
        -1: None,
    }
    assert found.single_characters() == {piece: token for piece, token in vocab.items() if len(piece) == 1}
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    assert found.ranks_of([*pairs, ("no", "merge"), ("\ud800", "")]) == ranks
    assert found.rest == {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}


@pytest.mark.parametrize("is_pretty", [False, True])
def test_it_reads_what_the_library_writes(is_pretty: bool) -> None:
    vocab = {piece: token for token, piece in enumerate(filter(None, AWKWARD))}
    vocab |= {"x": 40, "y": 41, "xy": 42, "xyx": 43}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("x", "y"), ("xy", "x")]))
    found = Vocabulary(tokenizer.to_str(pretty=is_pretty).encode())
    assert found.as_dict() == tokenizer.get_vocab()
    assert found.tokens_of(vocab) == vocab
    assert found.ranks_of([("xy", "x"), ("x", "y")]) == {("x", "y"): 0, ("xy", "x"): 1}


def test_it_reads_a_large_one() -> None:
    tokenizer_json = tokenizer_files(32_000, encoder=False)["tokenizer.json"]
    found = Vocabulary(json.dumps(tokenizer_json, ensure_ascii=False).encode())
    assert found.tokens_of(tokenizer_json["model"]["vocab"]) == tokenizer_json["model"]["vocab"]
    merges = [tuple(merge.split(" ")) for merge in tokenizer_json["model"]["merges"]]
    assert found.ranks_of(merges) == {merge: rank for rank, merge in enumerate(merges)}


PLAIN = written({"a": 0, "b": 1, "ab": 2}, ["a b"])
UNUSUAL = {
    "nothing": b"",
    "an odd quote": PLAIN + b'"',
    "no vocabulary": b'{"model": {"merges": ["a b"]}}',
    "an empty vocabulary": written({}, ["a b"]),
    "no merges": written({"a": 0, "b": 1}, []),
    "a single piece": written({"a": 0}, ["a b"]),
    "two vocabularies": written({"a": 0, "b": 1}, ["a b"], before={"vocab": {"c": 3}}),
    "a vocabulary elsewhere": b'{"other": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}',
    "merges of three": written({"a": 0, "b": 1}, [["a", "b", "a"], ["a", "b", "a"]]),
    "merges of both kinds": written({"a": 0, "b": 1}, ["a b", ["a", "b"]]),
    "merges of one": written({"a": 0, "b": 1}, [["a"], ["b"], ["a"]]),
    "something behind the merges": PLAIN[:-2] + b', "x": ["y"]}}',
    "something behind the model": PLAIN[:-1] + b', "x": 1}',
    "something between": PLAIN.replace(b', "merges"', b', "x": {"y": 1}, "merges"'),
    "merges first": b'{"model": {"merges": ["a b"], "vocab": {"a": 0, "b": 1}}}',
    "escapes that need not be": PLAIN.replace(b'"a"', b'"\\u0061"'),
    "an escaped line's end": written({"\n": 0, "b": 1}, ["a b"]).replace(b"\\n", b"\\u000a"),
    "a piece twice": PLAIN.replace(b'"b": 1', b'"a": 1'),
    "other spaces": PLAIN.replace(b'"b": 1', b'"b":  1'),
    "other spaces behind": PLAIN.replace(b": 1, ", b": 1 ,"),
    "a negative number": PLAIN.replace(b": 1", b": -1"),
    "no whole number": PLAIN.replace(b": 1", b": 1.5"),
    "a text for a number": PLAIN.replace(b": 1", b': "1"'),
    "a letter in a number": PLAIN.replace(b": 1", b": 1a"),
    "too long a number": PLAIN.replace(b": 1", b": 10000000"),
    "a nested vocabulary": PLAIN.replace(b": 1", b": {}"),
    "no number": PLAIN.replace(b": 1", b": "),
    "merges unlike": PLAIN.replace(b'"a b"', b'"a b", "b a","a a"'),
    "nested deeply": b"[" * 100_000 + PLAIN,
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_another_file_is_refused(kind: str) -> None:
    with pytest.raises(UnusualFileError):
        Vocabulary(UNUSUAL[kind])


def test_what_would_take_much_memory_or_time_is_refused() -> None:
    with pytest.raises(UnusualFileError, match="too many"):
        Vocabulary(written({"\\" * 70_000: 0, "b": 1}, ["a b"]))
    with pytest.raises(UnusualFileError, match="too many"):
        Vocabulary(b'"' * ((1 << 23) + 1))


@settings(max_examples=400, deadline=None)
@given(
    style=st.sampled_from(sorted(STYLES)),
    is_paired=st.booleans(),
    place=st.integers(0, 10_000),
    put=st.one_of(
        st.binary(max_size=2), st.sampled_from([b'"', b"\\", b"}", b"]", b",", b" ", b"0", b'\\"'])
    ),
    num_cut=st.integers(0, 3),
)
@example(style="spaced", is_paired=False, place=60, put=b'"', num_cut=0)
def test_a_changed_file_is_refused_or_read_as_it_is(
    style: str, is_paired: bool, place: int, put: bytes, num_cut: int
) -> None:
    merges = [["a", "b"], ["ab", '"']] if is_paired else ["a b", 'ab "']
    data = written({"a": 0, "b": 1, "ab": 2, '"': 3, "\\": 4}, merges, style=style)
    place %= len(data)
    data = data[:place] + put + data[place + num_cut :]
    try:
        tokenizer_json = json.loads(data)
        vocab = tokenizer_json["model"]["vocab"]
        merges = [
            tuple(merge) if is_paired else tuple(merge.split(" ", 1))
            for merge in tokenizer_json["model"]["merges"]
        ]
        if any(len(merge) != 2 for merge in merges):
            merges = []
    except (ValueError, KeyError, TypeError, AttributeError):
        vocab = None
    try:
        found = Vocabulary(data)
    except UnusualFileError:
        return
    if vocab is not None:
        assert found.as_dict() == vocab
        assert found.tokens_of(["a", "b", "ab", '"', "\\", *vocab]) == vocab
        if merges:
            assert found.ranks_of(merges) == {merge: rank for rank, merge in enumerate(merges)}
        assert found.rest == {
            **tokenizer_json,
            "model": {**tokenizer_json["model"], "vocab": {}, "merges": []},
        }
