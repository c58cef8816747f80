"""A text as input of a model: one run of tokens for a decoder, sentences for an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from ...loader.errors import UsageError
from ..files import ModelFiles
from ..text.backend import LocalBackend
from ..text.settings import TextSettings, read_tokenizer_file
from .text import EvaluationText

MIN_TOKENS = 16  # fewer are too few to measure
# All pairs are compared.
MAX_SENTENCES = 512


@dataclass(frozen=True, slots=True)
class DecoderInput:
    prefix: tuple[int, ...]  # the token that the model expects before every text, where it has one
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderInput:
    sentences: tuple[str, ...]
    token_lists: tuple[list[int], ...]  # of each sentence, special tokens included

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_lists))


class InputReader:
    """Encodes texts with the model's tokenizer. Raises `ModelError` if its files are missing or
    damaged.
    """

    def __init__(self, files: ModelFiles) -> None:
        settings = TextSettings.read(files.read)
        self._backend = LocalBackend.from_file(read_tokenizer_file(files.read), settings.special_tokens)
        self._bos = self._backend.piece_to_id(settings.special_tokens.get("bos_token", ""))

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The token that begins a text, or none where the tokenizer names none."""
        return () if self._bos is None else (self._bos,)

    def for_decoder(self, text: EvaluationText, max_tokens: int) -> DecoderInput:
        """The text's first tokens. Raises `UsageError` for fewer than `MIN_TOKENS`."""
        begin = self._backend.encode("a", add_special_tokens=True)[:1]
        prefix = tuple(begin) if begin == [self._bos] else ()
        tokens = self._backend.encode(text.content, add_special_tokens=False)[:max_tokens]
        if len(tokens) < MIN_TOKENS:
            raise UsageError(
                f"the text has {len(tokens)} tokens, fewer than {MIN_TOKENS}",
                key="text",
                hint="Give more.",
            )
        return DecoderInput(prefix, tuple(tokens))

    def for_encoder(self, text: EvaluationText, max_tokens: int, *, max_sentence_tokens: int) -> EncoderInput:
        """The text's first sentences, at least one; long ones are truncated."""
        sentences: list[str] = []
        token_lists: list[list[int]] = []
        left = max_tokens
        for sentence in text.sentences()[:MAX_SENTENCES]:
            tokens = self._backend.encode(sentence, add_special_tokens=True)
            if len(tokens) > max_sentence_tokens:  # keep the special token at the end
                tokens = [*tokens[: max_sentence_tokens - 1], tokens[-1]]
            left -= len(tokens)
            if left < 0 and sentences:
                break
            sentences.append(sentence)
            token_lists.append(tokens)
        return EncoderInput(tuple(sentences), tuple(token_lists))
