"""Texts and pairs of texts on their way to an encoder, shortened where the request permits it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...runtime.errors import RequestError
from ...runtime.text.pairs import EncodedPair
from .fields import Fields, refuse_unsupported
from .parameters import WHOLE_CONTEXT


class EncoderBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields that routes over texts share."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    user: str | None = None  # without effect
    priority: int | None = None

    @property
    def wants_logits(self) -> bool:
        return self.use_activation is False or self.activation is False


class EncoderUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def check_encoder_body(body: EncoderBody, fields: Fields) -> None:
    """Raises `RequestError` for what is not supported, or is out of range."""
    refuse_unsupported(body, fields)
    keep = body.truncate_prompt_tokens
    if keep is not None and keep != WHOLE_CONTEXT and keep < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, but must be at least 1, or -1 for all that the model takes",
            param="truncate_prompt_tokens",
        )


def as_texts(given: str | list[str], *, param: str, max_texts: int) -> list[str]:
    """One or several texts as several. Raises `RequestError` for none and for too many."""
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise RequestError(f"{param} is empty", param=param)
    if len(texts) > max_texts:
        raise RequestError(
            f"{param} has {len(texts)} items, but may have {max_texts}",
            param=param,
            hint="Send several requests.",
        )
    return texts


def within(pairs: Sequence[EncodedPair], keep: int | None, max_tokens: int) -> list[EncodedPair]:
    """Shortened to `keep`, which is `truncate_prompt_tokens`, and to the `max_tokens` that the model takes."""
    if keep is None:
        return list(pairs)
    return [pair.within(max_tokens if keep == WHOLE_CONTEXT else min(keep, max_tokens)) for pair in pairs]
