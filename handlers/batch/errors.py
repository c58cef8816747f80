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
    """The output belongs to a job of another input, model or options, or is not a job's."""


class JobFormatError(FormatError):
    """A file in the job's work folder is damaged, hostile, or from a newer version. It was not
    used.
    """


class ModelBrokenError(ModelError):
    """The model stopped answering while it ran. Finished parts are kept; another instance can
    continue.
    """


# Errors after which another run can continue: exit code 75, and `JobRetryError` for events.
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
