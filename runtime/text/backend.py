"""The tokenizer protocol, and the one in this process (`LocalBackend`); `remote.py` has one in a
child process.

Encoders take texts, and pairs of texts, with their special tokens and segments. A text that is too
long is truncated at its end, and keeps its special tokens; in a pair the second text is shortened
first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import ContextLengthError, ModelError, RequestError
from .pieces import max_token_bytes

if TYPE_CHECKING:
    import tokenizers

# The part of a token that belongs to neither text.
SPECIAL = -1
MAX_TOKEN = 1 << 32
# Of a tokenizer.json that is fast enough to be read twice.
MAX_SMALL_FILE_BYTES = 256 << 10


class EncodedPair(NamedTuple):
    """N tokens. A single text is a pair without its second part."""

    tokens: tuple[int, ...]
    types: tuple[int, ...]  # row of each token in the model's table of types
    # 0 or 1: the text of each token; or SPECIAL.
    parts: tuple[int, ...]

    def within(self, max_tokens: int) -> EncodedPair:
        """The pair truncated to `max_tokens`. Raises `ContextLengthError` if the special tokens
        alone are more.
        """
        excess = len(self.tokens) - max_tokens
        if excess <= 0:
            return self
        kept = [place for place, part in enumerate(self.parts) if part == SPECIAL]
        if len(kept) > max_tokens:
            raise ContextLengthError(
                f"max_tokens {max_tokens} is less than the {len(kept)} special tokens",
                param="truncate_prompt_tokens",
            )
        for part in (0, 1):
            own = [place for place, other in enumerate(self.parts) if other == part]
            kept += own[: max_tokens - len(kept)]
        return self._at(sorted(kept))

    def with_part(self, part: int, max_tokens: int) -> EncodedPair:
        """The pair with at most `max_tokens` of one of the texts."""
        gone = {place for place, other in enumerate(self.parts) if other == part}
        gone -= set(sorted(gone)[:max_tokens])
        return self._at([place for place in range(len(self.tokens)) if place not in gone]) if gone else self

    def _at(self, places: Sequence[int]) -> EncodedPair:
        return EncodedPair(
            tuple(self.tokens[place] for place in places),
            tuple(self.types[place] for place in places),
            tuple(self.parts[place] for place in places),
        )


class TokenizerBackend(Protocol):
    """A tokenizer. Thread-safe. `TextTokenizer` has checked the arguments."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_token_bytes(self) -> int | None:
        """The maximum number of a text's bytes for one token; None: unknown."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[EncodedPair]:
        """Encode each pair, or single text, with the tokenizer's template for it."""

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The half-open range of characters of each token of `encode(text,
        add_special_tokens=False)`.
        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode tokens. Raises `RequestError` for numbers that no vocabulary could contain."""

    def id_to_piece(self, token: int) -> str | None: ...

    def piece_to_id(self, piece: str) -> int | None: ...

    def tokenizer_json(self) -> bytes:
        """The tokenizer as the content of a tokenizer.json."""

    def close(self) -> None: ...


class LocalBackend:
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        *,
        max_token_bytes: int | None = None,
    ) -> None:
        """Take ownership of `tokenizer`, and change its settings.

        All named special tokens in its vocabulary are recognised in texts, and skipped when
        decoding.
        """
        # Files of embedding models enable both; here each text has its own length, and the engine
        # refuses texts that are too long.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        known = [text for text in special_tokens.values() if tokenizer.token_to_id(text) is not None]
        tokenizer.add_special_tokens(known)
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_bytes = max_token_bytes

    @classmethod
    def from_file(cls, data: bytes, special_tokens: Mapping[str, str]) -> LocalBackend:
        """Read the content of tokenizer.json. Holds the GIL for as long as 0.4 s. Raises
        `ModelError`.
        """
        # 17 ms that modules that only name this class need not pay.
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:
            # A bug in the library's Rust raises PanicException, which is not an Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ModelError(f"tokenizer.json cannot be read: {error}") from error
            raise
        return cls(tokenizer, special_tokens, max_token_bytes=_max_token_bytes(data))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All pieces and the added tokens, as a new dict, which holds the GIL for 0.1 s."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, it releases the GIL.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
        return tokens

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[EncodedPair]:
        inputs = [text if other is None else (text, other) for text, other in pairs]
        return [
            EncodedPair(
                tuple(encoding.ids),
                tuple(encoding.type_ids),
                tuple(SPECIAL if part is None else part for part in encoding.sequence_ids),
            )
            for encoding in self.tokenizer.encode_batch(inputs)
        ]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        # Not the fast one, which gives no offsets.
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"invalid tokens: {error}", param="tokens") from error
        return text

    def id_to_piece(self, token: int) -> str | None:
        piece: str | None = self.tokenizer.id_to_token(token)
        return piece

    def piece_to_id(self, piece: str) -> int | None:
        token: int | None = self.tokenizer.token_to_id(piece)
        return token

    def tokenizer_json(self) -> bytes:
        text: str = self.tokenizer.to_str()
        return text.encode()

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def _max_token_bytes(data: bytes) -> int | None:
    """The bound of a small vocabulary, from tokenizer.json; `SubsetTokenizer` reads large ones that
    have a bound.
    """
    if len(data) >= MAX_SMALL_FILE_BYTES:
        return None
    try:
        file = json.loads(data)
        vocabulary = file["model"]["vocab"]
        pieces = frozenset(vocabulary)
        longest = max(map(len, pieces), default=0)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return max_token_bytes(file, longest, pieces.issuperset)
