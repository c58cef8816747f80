"""The conversion of a chosen token to its event, including all errors."""

from __future__ import annotations

import logging

from ...loader.errors import TeneralError
from ..errors import GrammarError, ModelError
from ..step.requests import FinishReason, GenerationEvent
from ..step.state import Choice, Chosen
from .sequence import Sequence

logger = logging.getLogger(__name__)


def accept(sequence: Sequence, choice: Chosen) -> GenerationEvent:
    """Append the token to the sequence, and the tokens that its grammar then forces.

    An error instead of a token, or in its text, ends only that sequence.
    """
    if not isinstance(choice, Choice):
        return error_event(choice)
    try:
        return sequence.accept(choice)
    except GrammarError as error:
        return error_event(error)
    except Exception as error:  # an error of the tokenizer's decoder must not end the other sequences
        logger.exception("request %s: detokenising failed", sequence.generation.request.request_id)
        return error_event(as_teneral_error(error))


def error_event(error: TeneralError) -> GenerationEvent:
    """The last event of a failed sequence."""
    return GenerationEvent("", (), finish_reason=FinishReason.ERROR, error=error)


def as_teneral_error(error: Exception) -> TeneralError:
    """The error itself, or a `ModelError` about it."""
    if isinstance(error, TeneralError):
        return error
    failure = ModelError(f"the model failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
