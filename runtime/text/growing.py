"""A tokenizer that encodes before its vocabulary is parsed, and parses it later, or on demand."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ..errors import ModelError
from .backend import LocalBackend
from .pairs import EncodedPair
from .subset import SubsetTokenizer


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
