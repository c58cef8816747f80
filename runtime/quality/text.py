"""The text of an evaluation, a user's file or a small built-in one, and the inputs that a model
makes of it: one run of tokens for a decoder, sentences for an encoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...loader.errors import NotFoundError, UsageError
from ..files import ModelFiles
from ..text.backend import LocalBackend
from ..text.settings import TextSettings, read_tokenizer_file

# Tokenising this much takes up to 0.7 s, and superlinear time beyond.
MAX_TEXT_BYTES = 1 << 20

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
MIN_TOKENS = 16  # fewer are too few to measure
# All pairs are compared.
MAX_SENTENCES = 512


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text. `name` is the file's, or None for the built-in text."""

    name: str | None
    content: str

    def sentences(self) -> list[str]:
        """The distinct sentences with at least one letter, in order, split at ends of lines and of
        sentences.
        """
        found = (sentence.strip() for sentence in _SENTENCE_END.split(self.content))
        return list(dict.fromkeys(sentence for sentence in found if any(map(str.isalpha, sentence))))


def read_text(path: str | None) -> EvaluationText:
    """Read the file's text, or the built-in one without a path.

    Raises `NotFoundError`, and `UsageError` for a file that is too long, empty, or not UTF-8.
    """
    if path is None:
        return EvaluationText(None, BUILT_IN)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}", source=path) from error
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(
            f"{path} is larger than {MAX_TEXT_BYTES} bytes",
            key="text",
            hint="Use a part of it: a few thousand tokens are enough.",
        )
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}", key="text") from error
    if not content.strip():
        raise UsageError(f"{path} has no text in it", key="text")
    return EvaluationText(path, content)


# Of several kinds, so that no single one dominates: prose, instructions, a conversation, figures,
# code.
BUILT_IN = """\
The ferry leaves the island twice a day, once before sunrise and once in the late afternoon. Fishermen use the first \
boat, because the market on the mainland opens at six. By the time the second one sails, most of the visitors are \
already waiting on the pier with their bags.
Nobody remembers who built the lighthouse. An old map shows it in 1783, but the stones at its foot are much older, and \
some of them carry marks that no one has been able to read.
To make the dough, mix five hundred grams of flour with a little salt and three hundred millilitres of warm water. \
Knead it for ten minutes, cover it with a cloth, and let it rest until it has doubled in size. Bake the bread in a \
very hot oven for half an hour.
A cell takes in sugar and oxygen and turns them into energy, water and carbon dioxide. Plants do the reverse in \
daylight: they take carbon dioxide from the air and build sugar with the energy of the sun.
"Have you seen my keys?" she asked. "They were on the kitchen table this morning." "I think you left them in your \
coat," he said, without looking up from his newspaper.
The committee met on Tuesday to discuss the budget for the coming year. Spending on roads will rise by four percent, \
while the library keeps the same amount as before. Two members voted against the plan and asked for a second reading.
If the pump does not start, first check that the valve is open and that the tank is not empty. Then press the red \
button for three seconds. If the light keeps blinking, switch the machine off and call the service desk.
In mathematics, a prime number is a whole number greater than one that can be divided only by one and by itself. The \
first five are 2, 3, 5, 7 and 11. There is no largest prime, which was proved more than two thousand years ago.
def average(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
The function above returns the arithmetic mean of a list of numbers, and raises an error when the list is empty.
Winter came early that year. Snow lay on the passes before the last sheep had been brought down, and the village was \
cut off for eleven weeks.
The bank raised its interest rate by a quarter of a point. Shares fell slightly after the announcement, and the \
currency gained against its neighbours.
My grandmother kept bees behind the house. She said that they knew her voice, and she told them everything that \
happened in the family.
"""


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
