"""What becomes of an event that did not end well, in two names that a platform's retry rules can tell apart.

    JobRetryError    worth another run, which goes on from where this one was
    JobFailedError   another run fails in the same way
    └── EventError   … because the event is invalid

On Lambda these are the `errorType`, and so what Step Functions' `ErrorEquals` names.
"""

from __future__ import annotations

from ....loader.errors import TeneralError, UsageError
from ....runtime.errors import RequestError, TryAgainError
from ..errors import WORTH_ANOTHER_RUN


class JobRetryError(TryAgainError):
    """The job is not complete, and another run goes on with it. What was finished is kept."""

    code = "job_retry"


class JobFailedError(RequestError):
    """The job cannot be done, however often it is tried."""

    code = "job_failed"


class EventError(JobFailedError):
    """An invalid event. `param` names the place. Of what the event says, halves of characters are shown
    by their numbers: they cannot be sent.
    """

    code = "bad_event"

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(_sendable(message), param=_sendable(param), hint=hint)


def as_job_error(error: TeneralError) -> JobRetryError | JobFailedError:
    """The same, under one of the two names."""
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
