"""A tokenizer that need not wait for its vocabulary: each text is tokenised with what of it that text can come to.

For a vocabulary of 150,000 pieces the `tokenizers` library takes 0.3 s, three times as long as it takes to read the
same file as JSON, and the first prompt of a cold start would wait for it. But BPE does nothing except to join symbols
that stand side by side in a word. So all that it can make of a word are runs of that word's symbols; every other piece,
and every merge of others, might as well not be there. Here the library gets, for each text, a tokenizer with just those
pieces and merges, whose order is as it was: what it says is what the whole one would say.

That is worth it for the first few texts. It costs more for each, and for long ones too much: then there is no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, groupby
from typing import Any

from .backend import LocalBackend

MIN_FILE_BYTES = 256 << 10  # the library has read a smaller one in 20 ms
MAX_CHARS = 20_000
MAX_RUNS = 100_000  # of symbols of one text, which take 40 ms
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_RENAMING = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)  # with these a run is not its symbols


class SubsetTokenizer:
    """Of a BPE vocabulary. Thread-safe. Where it has no answer, `None` says so."""

    def __init__(self, file: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
        """`file` is what tokenizer.json says, and becomes this one's. Raises `ValueError`, `TypeError`, `KeyError` or
        `AttributeError` when it is not of a kind that this could do, and `ModelError` when the library refuses it.
        """
        model = file["model"]
        if model["type"] != "BPE" or any(map(model.get, _RENAMING)):
            raise ValueError("these pieces are no runs of symbols")
        self._rest = {name: value for name, value in file.items() if name != "model"}
        self._settings = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
        self._ids: dict[str, int] = model["vocab"]  # and the added tokens'
        self._added = _numbered(file.get("added_tokens") or [], self._ids)
        if any(_might_be_a_symbol(text, model) for text in self._added):
            raise ValueError("an added token would be taken for a symbol")
        self._ids.update(self._added)
        self._special_tokens = special_tokens
        self.vocab_size = len(self._ids)
        lengths = list(map(len, self._ids))
        self._longest = max(lengths, default=0)
        self._is_paired = bool(model["merges"]) and not isinstance(model["merges"][0], str)
        merges = map(tuple, model["merges"]) if self._is_paired else model["merges"]
        self._ranks: dict[Any, int] = dict(zip(merges, range(len(model["merges"])), strict=True))
        # Not to take whole words that are spelt as added tokens.
        symbols = compress(self._ids, map((1).__eq__, lengths))
        self.tokenizer = self._tokenizer_of(symbols, ignore_merges=False).tokenizer  # with all other settings
        self._in_order: list[str] = list(self._ids)

    @classmethod
    def from_file(cls, data: bytes, special_tokens: Mapping[str, str]) -> SubsetTokenizer | None:
        """From the content of tokenizer.json; None where the library had better read all of it, and say what is wrong
        with it, if anything. Raises `ModelError`.
        """
        if len(data) < MIN_FILE_BYTES:
            return None
        try:
            return cls(json.loads(data.decode()), special_tokens)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """As `Backend.encode`."""
        tokenizer = self._tokenizer_for(text)
        return None if tokenizer is None else tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def offsets(self, text: str) -> list[tuple[int, int]] | None:
        """As `Backend.offsets`."""
        tokenizer = self._tokenizer_for(text)
        return None if tokenizer is None else tokenizer.offsets(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As `Backend.decode`."""
        pieces = [piece for token in set(tokens) if (piece := self.id_to_piece(token)) is not None]
        return self._tokenizer_of(pieces).decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str | None:
        if 0 <= token < len(self._in_order):  # as it is in most files
            piece = self._in_order[token]
            if self._ids[piece] == token:
                return piece
        return self._pieces.get(token)

    def piece_to_id(self, piece: str) -> int | None:
        return self._ids.get(piece)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All pieces, and the added tokens."""
        return self._ids

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {token: piece for piece, token in self._ids.items()}

    def _tokenizer_for(self, text: str) -> LocalBackend | None:
        runs = self._runs_of(text)
        if runs is None or not runs.isdisjoint(
            self._added
        ):  # which no model makes, but would with the subset
            return None
        pieces = runs & self._ids.keys()
        return self._tokenizer_of(pieces, sorted(self._merges_among(pieces), key=self._ranks.__getitem__))

    def _runs_of(self, text: str) -> set[str] | None:
        """All that could be made of the text's words; None when it is too much."""
        if len(text) > MAX_CHARS:
            return None
        words = set(self._words_of(text))
        if sum(len(word) * min(len(word), self._longest) for word in words) > MAX_RUNS:
            return None
        return {
            "".join(word[begin:end])
            for word in words
            for begin in range(len(word))
            for end in range(begin + 1, min(begin + self._longest, len(word)) + 1)
        }

    def _words_of(self, text: str) -> Iterator[tuple[str, ...]]:
        """The symbols of each word: what BPE begins with."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        symbols = zip(encoding.word_ids, encoding.tokens, strict=True)
        for _, word in groupby(symbols, lambda symbol: symbol[0]):
            yield tuple(symbol for _, symbol in word if symbol not in self._added)

    def _merges_among(self, pieces: set[str]) -> Iterator[Any]:
        for piece in pieces:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                merge = (left, right) if self._is_paired else f"{left} {right}"
                if merge in self._ranks and left in pieces and right in pieces:
                    yield merge

    def _tokenizer_of(
        self, pieces: Iterable[str], merges: Sequence[Any] = (), **settings: Any
    ) -> LocalBackend:
        """With these pieces and merges, and the pieces that any text might need."""
        ids = self._ids
        always = [*self._added, *self._special_tokens.values(), self._settings.get("unk_token")]
        always += [entry["content"] for entry in self._rest.get("added_tokens") or []]
        if self._settings.get("byte_fallback"):
            always += [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {piece: ids[piece] for piece in (*pieces, *always) if piece in ids}
        model = {**self._settings, **settings, "vocab": vocab, "merges": merges}
        return LocalBackend.from_file(
            json.dumps({**self._rest, "model": model}).encode(), self._special_tokens
        )


def _numbered(added: Sequence[Mapping[str, Any]], ids: Mapping[str, int]) -> dict[str, int]:
    """The added tokens that the model does not have, with their numbers. Raises `ValueError` when these are not those
    that the library gives, which goes by the vocabulary's size.
    """
    numbered = {entry["content"]: entry["id"] for entry in added if entry["content"] not in ids}
    in_vocabulary = [ids[entry["content"]] for entry in added if entry["content"] in ids]
    is_in_order = list(numbered.values()) == list(range(len(ids), len(ids) + len(numbered)))
    if not is_in_order or max(in_vocabulary, default=0) >= len(ids):
        raise ValueError("added tokens have numbers of their own")
    return numbered


def _might_be_a_symbol(text: str, model: Mapping[str, Any]) -> bool:
    return len(text) == 1 or text == model.get("unk_token") or _BYTE_PIECE.fullmatch(text) is not None
