"""Errors of events, with two names that a platform's retry rules can distinguish.

    JobRetryError    worth another run, which continues from this one
    JobFailedError   another run fails in the same way
    └── EventError   … because the event is invalid

On Lambda these are the `errorType`, the names in Step Functions' `ErrorEquals`.
"""

from __future__ import annotations

from ....loader.errors import TeneralError, UsageError
from ....runtime.errors import RequestError, TryAgainError
from ..errors import WORTH_ANOTHER_RUN


class JobRetryError(TryAgainError):
    """The job is not complete; another run continues it. Finished parts are kept."""

    code = "job_retry"


class JobFailedError(RequestError):
    """The job cannot be done, no matter how often it is retried."""

    code = "job_failed"


class EventError(JobFailedError):
    """An invalid event. `param` names the place. Lone surrogates in the event's text are shown as
    numbers, because they cannot be encoded.
    """

    code = "bad_event"

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(_sendable(message), param=_sendable(param), hint=hint)


def as_job_error(error: TeneralError) -> JobRetryError | JobFailedError:
    """The error under one of the two names."""
    if isinstance(error, JobRetryError | JobFailedError):
        return error
    kind = type(error).__name__
    if isinstance(error, WORTH_ANOTHER_RUN):
        found: JobRetryError | JobFailedError = JobRetryError(f"{kind}: {error.message}", hint=error.hint)
    elif isinstance(error, UsageError):
        found = EventError(error.message, param=error.key, hint=error.hint)
    else:
        found = JobFailedError(f"{kind}: {error.message}", hint=error.hint)
    found.__cause__ = error
    return found


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
