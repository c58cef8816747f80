"""Tokenizers that need not parse their vocabulary: each text is encoded with the pieces that it
could contain, until the whole vocabulary is parsed, later or on demand.

The `tokenizers` library takes 0.3 s for a vocabulary of 150,000 pieces, and the first prompt of a
cold start would wait for it. But BPE only joins adjacent symbols of a word. All possible pieces of
a word are therefore runs of its symbols; all other pieces and merges are irrelevant. For each text,
the library gets a tokenizer with just those pieces and merges, in their original order: its result
is that of the whole vocabulary. They are found in the file's bytes (`vocabulary.py`), in a tenth of
the time.

This is worthwhile for the first few texts. Each text costs more, and long ones too much: they
return None.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..errors import ModelError
from .backend import MAX_SMALL_FILE_BYTES, EncodedPair, LocalBackend
from .pieces import max_token_bytes
from .vocabulary import Vocabulary

# The library reads a smaller one in 20 ms.
MIN_FILE_BYTES = MAX_SMALL_FILE_BYTES
MAX_CHARS = 20_000
# Of symbols of one text; a text of 25,000 takes 0.09 s.
MAX_RUNS = 100_000
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_RENAMING = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    # With these, a run's text is not that of its symbols.
)


class SubsetTokenizer:
    """The tokenizer of a BPE vocabulary. Thread-safe. Returns None where it cannot answer."""

    def __init__(self, vocabulary: Vocabulary, special_tokens: Mapping[str, str]) -> None:
        """Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for a kind of file that
        is not supported here, and `ModelError` if the library rejects it.
        """
        file: dict[str, Any] = vocabulary.rest
        model = file["model"]
        if model["type"] != "BPE" or any(map(model.get, _RENAMING)):
            raise ValueError("these pieces are not runs of symbols")
        self._vocabulary = vocabulary
        self._file = file
        self._special_tokens = special_tokens
        self._added = _numbered(file.get("added_tokens") or [], vocabulary)
        if any(_might_be_a_symbol(text, model) for text in self._added):
            raise ValueError("an added token could be confused with a symbol")
        self.vocab_size = len(vocabulary) + len(self._added)
        self.max_token_bytes = max_token_bytes(file, vocabulary.longest, self._has_pieces)
        self._always = self._tokens_of_any_text()
        # So that whole words spelt like added tokens are not recognised.
        symbols = vocabulary.single_characters()
        self.tokenizer = self._tokenizer_of(symbols, ignore_merges=False).tokenizer  # with all other settings

    @classmethod
    def from_file(cls, data: bytes, special_tokens: Mapping[str, str]) -> SubsetTokenizer | None:
        """Read the content of tokenizer.json. Raises `ModelError`.

        None: the library should read the whole file instead, and report its errors, if any.
        """
        if len(data) < MIN_FILE_BYTES:
            return None
        try:
            return cls(Vocabulary(data), special_tokens)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Encode like `Backend.encode`, or return None."""
        tokenizer = self._tokenizer_for(text)
        return None if tokenizer is None else tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def offsets(self, text: str) -> list[tuple[int, int]] | None:
        """Offsets like `Backend.offsets`, or None."""
        tokenizer = self._tokenizer_for(text)
        return None if tokenizer is None else tokenizer.offsets(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode like `Backend.decode`."""
        pieces = {piece: token for token in set(tokens) if (piece := self.id_to_piece(token)) is not None}
        return self._tokenizer_of(pieces).decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str | None:
        for piece, number in self._added.items():
            if number == token:
                return piece
        return self._vocabulary.piece_of(token)

    def piece_to_id(self, piece: str) -> int | None:
        return self._added.get(piece, self._vocabulary.tokens_of([piece]).get(piece))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All pieces and the added tokens, as a new dict, which holds the GIL for 0.09 s."""
        return self._vocabulary.as_dict() | self._added

    def _has_pieces(self, pieces: Collection[str]) -> bool:
        return len(self._vocabulary.tokens_of(pieces)) == len(set(pieces))

    def _tokenizer_for(self, text: str) -> LocalBackend | None:
        runs = self._runs_of(text)
        # No model makes the added ones, but the subset would.
        if runs is None or not runs.isdisjoint(self._added):
            return None
        pieces = self._vocabulary.tokens_of(runs)
        ranks = self._vocabulary.ranks_of(_possible_merges(pieces))
        return self._tokenizer_of(pieces, sorted(ranks, key=ranks.__getitem__))

    def _runs_of(self, text: str) -> set[str] | None:
        """All possible pieces of the text's words; None if there are too many."""
        if len(text) > MAX_CHARS:
            return None
        words = set(self._words_of(text))
        longest = self._vocabulary.longest
        if sum(len(word) * min(len(word), longest) for word in words) > MAX_RUNS:
            return None
        return {
            "".join(word[begin:end])
            for word in words
            for begin in range(len(word))
            for end in range(begin + 1, min(begin + longest, len(word)) + 1)
        }

    def _words_of(self, text: str) -> Iterator[tuple[str, ...]]:
        """The symbols of each word, BPE's initial state."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        symbols = zip(encoding.word_ids, encoding.tokens, strict=True)
        for _, word in groupby(symbols, lambda symbol: symbol[0]):
            yield tuple(symbol for _, symbol in word if symbol not in self._added)

    def _tokens_of_any_text(self) -> dict[str, int]:
        names = [*self._special_tokens.values(), self._file["model"].get("unk_token") or ""]
        names += [entry["content"] for entry in self._file.get("added_tokens") or []]
        if self._file["model"].get("byte_fallback"):
            names += [f"<0x{byte:02X}>" for byte in range(256)]
        return self._vocabulary.tokens_of(names) | self._added

    def _tokenizer_of(
        self, pieces: Mapping[str, int], merges: Sequence[tuple[str, str]] = (), **settings: Any
    ) -> LocalBackend:
        """A tokenizer with these pieces and merges, and the pieces that any text might need."""
        vocab = {**pieces, **self._always}
        model = {**self._file["model"], **settings, "vocab": vocab, "merges": merges}
        return LocalBackend.from_file(
            json.dumps({**self._file, "model": model}).encode(), self._special_tokens
        )


def _possible_merges(pieces: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that join to a piece."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _numbered(added: Sequence[Mapping[str, Any]], vocabulary: Vocabulary) -> dict[str, int]:
    """The added tokens that the model does not have, with their numbers.

    Raises `ValueError` if these differ from the library's numbers, which continue from the
    vocabulary's size.
    """
    known = vocabulary.tokens_of([entry["content"] for entry in added])
    numbered = {entry["content"]: entry["id"] for entry in added if entry["content"] not in known}
    size = len(vocabulary)
    is_in_order = list(numbered.values()) == list(range(size, size + len(numbered)))
    if not is_in_order or max(known.values(), default=0) >= size:
        raise ValueError("added tokens have numbers of their own")
    return numbered


def _might_be_a_symbol(text: str, model: Mapping[str, Any]) -> bool:
    return len(text) == 1 or text == model.get("unk_token") or _BYTE_PIECE.fullmatch(text) is not None


class GrowingBackend:
    """A `Backend` that uses subsets of its vocabulary, where they suffice, until `complete` is
    called. Thread-safe.
    """

    def __init__(self, data: bytes, special_tokens: Mapping[str, str]) -> None:
        """`data` is the content of tokenizer.json. Raises `ModelError`."""
        self.has_decoded = threading.Event()  # set by the first decode
        self._data = data
        self._special_tokens = special_tokens
        self._whole: LocalBackend | None = None
        self._error: ModelError | None = None
        self._completing = threading.Lock()
        self._subset = SubsetTokenizer.from_file(data, special_tokens)
        self.vocab_size = self.current.vocab_size
        self.max_token_bytes = self.current.max_token_bytes

    @property
    def is_whole(self) -> bool:
        return self._subset is None

    @property
    def current(self) -> LocalBackend | SubsetTokenizer:
        """The tokenizer in use. Raises the errors of `complete`."""
        return self._subset or self.complete()

    def complete(self) -> LocalBackend:
        """Parse the vocabulary, once; holds the GIL for as long as 0.4 s.

        Raises `ModelError` if it cannot be parsed, as all other methods do from then on.
        """
        with self._completing:
            if self._error is not None:
                raise self._error
            if self._whole is None:
                # First, so that memory is not needed for both.
                self._subset = None
                try:
                    self._whole = LocalBackend.from_file(self._data, self._special_tokens)
                except ModelError as error:
                    self._error = error
                    raise
                finally:
                    self._data = b""
            return self._whole

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = self.current.encode(text, add_special_tokens=add_special_tokens)
        return (
            self.complete().encode(text, add_special_tokens=add_special_tokens) if tokens is None else tokens
        )

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[EncodedPair]:
        return self.complete().encode_pairs(pairs)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        offsets = self.current.offsets(text)
        return self.complete().offsets(text) if offsets is None else offsets

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.has_decoded.set()
        return self.current.decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str | None:
        return self.current.id_to_piece(token)

    def piece_to_id(self, piece: str) -> int | None:
        return self.current.piece_to_id(piece)

    def tokenizer_json(self) -> bytes:
        return self._data or self.complete().tokenizer_json()  # set until the vocabulary is parsed

    def close(self) -> None:
        """Do nothing: there is no process to end."""
