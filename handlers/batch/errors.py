"""Errors of batch jobs, under the trees of loader and runtime."""

from __future__ import annotations

from ...loader.errors import (
    AlreadyExistsError,
    FormatError,
    LoadError,
    NoSpaceError,
    SourceClosedError,
    UnavailableError,
)
from ...runtime.errors import CancelledError, CapacityError, DrainingError, ModelError, UnloadedError


class JobMismatchError(AlreadyExistsError):
    """The output's place belongs to a job of another input, model or options, or to something that is no job."""


class JobFormatError(FormatError):
    """What a job has left in its work folder is damaged, hostile, or from a newer version. Nothing of it was used."""


class ModelBrokenError(ModelError):
    """The model ran, and answers nothing any more. What was finished is kept; another instance can go on from there."""


# Errors after which another run goes on from what is finished: exit code 75, and `JobRetryError` for events.
WORTH_ANOTHER_RUN = (
    UnavailableError,
    NoSpaceError,
    SourceClosedError,
    LoadError,
    DrainingError,
    CapacityError,
    UnloadedError,
    CancelledError,
    ModelBrokenError,
)
