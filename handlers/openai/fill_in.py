"""Prompts of models that fill in the middle: what is before and after the place, between special tokens.

A family is known by the tokens that its vocabulary has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ...runtime.errors import RequestError

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

MAX_FILES = 256  # of a request's further context


class FillTokens(Struct, frozen=True):
    """The special tokens of a family, as its vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str = ""  # '': the suffix comes first, and the prefix last
    file: str = ""  # before the name of another file
    repository: str = ""


FAMILIES = (
    FillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"),
    FillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>"),
    FillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    FillTokens("[PREFIX]", "[SUFFIX]"),
)
# With which such an answer may end, besides the model's own ends.
ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<file_sep>", "▁<EOT>")


class ContextFile(msgspec.Struct, frozen=True, kw_only=True):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None
    time: float | None = None  # without effect


def fill_prompt(
    tokenizer: TextTokenizer,
    prefix: str,
    suffix: str,
    *,
    files: Sequence[ContextFile] = (),
    begun: str = "",
    param: str = "suffix",
) -> list[int]:
    """The tokens of a prompt whose answer is between `prefix` and `suffix`, and goes on from `begun`.

    Raises `RequestError` for a model without such tokens.
    """
    family = next((each for each in FAMILIES if _knows(tokenizer, each)), None)
    if family is None:
        raise RequestError(
            f"{param} is not supported: the model's vocabulary has no tokens for filling in the middle",
            param=param,
            hint="Serve a model of code that fills in, or leave it out.",
        )

    def special(piece: str) -> list[int]:
        token = tokenizer.piece_to_id(piece) if piece else None
        return [] if token is None else [token]

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False) if part else []

    before = text(prefix)
    after = [*special(family.suffix), *text(suffix)]
    start = tokenizer.encode("", add_special_tokens=True)
    context: list[int] = []
    if files and (first := special(family.repository)):
        context += [*first, *text("repository\n")]
    for file in files:
        separator = special(family.file)
        head = f"{file.filename or 'file'}\n" if separator else "\n\n--- snippet ---\n\n"
        context += [*separator, *text(head + file.text)]
    if files and (separator := special(family.file)):
        context += [*separator, *text("filename\n")]
    if not family.middle:
        return [*start, *context, *after, *special(family.prefix), *before, *text(begun)]
    return [*start, *context, *special(family.prefix), *before, *after, *special(family.middle), *text(begun)]


def end_tokens(tokenizer: TextTokenizer) -> list[int]:
    """Tokens that end the middle, in this vocabulary."""
    tokens = (tokenizer.piece_to_id(piece) for piece in ENDS)
    return [token for token in tokens if token is not None]


def _knows(tokenizer: TextTokenizer, family: FillTokens) -> bool:
    pieces = [piece for piece in (family.prefix, family.suffix, family.middle) if piece]
    return all(tokenizer.piece_to_id(piece) is not None for piece in pieces)
