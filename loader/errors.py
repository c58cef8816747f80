"""Every error that Teneral raises on purpose, below the engine.

    TeneralError
    ├── UsageError               an invalid flag, key or value
    ├── SourceError              the store: says which object, and what to do
    │   ├── NotFoundError
    │   ├── AccessDeniedError
    │   ├── UnavailableError     worth another try
    │   ├── ChangedError         the object was replaced while it was read
    │   ├── AlreadyExistsError   a conditional write lost
    │   ├── NoSpaceError
    │   └── SourceClosedError    a read was given up because its source was closed
    ├── FormatError              what was read is not what the format allows
    │   ├── ManifestError
    │   ├── CheckpointError      a safetensors file or a model directory
    │   └── IntegrityError       bytes that differ from their digest
    ├── NativeLibraryError       the native core's library does not load, or is of another version
    ├── PartsUnavailableError    weights that are read on demand did not come this time: worth another try
    ├── InsufficientMemoryError  something does not fit in what the container has
    └── LoadError                a load ended before all weights were there
        └── LoadCancelledError   … on request

An error says what is wrong, where, and what to do (`hint`). All but the message is optional, so
that an error can cross processes. It knows no exit codes and no HTTP statuses: those belong to the
edge (`teneral.cli`, `teneral.handlers`).
"""

from __future__ import annotations

# Of the dynamic loader's messages.
_UNMAPPED = ("failed to map segment", "annot allocate memory", "cannot create shared object descriptor")


class TeneralError(Exception):
    """Root of all errors raised on purpose. `hint` is one sentence that says what a user can do, or
    ''.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(TeneralError):
    """A flag, configuration key or argument with an invalid value. `key` names it as the user
    wrote it.
    """

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class SourceError(TeneralError):
    """Something about a store. `source` is its address without secrets, `name` the object, '' for
    the store itself.
    """

    def __init__(self, message: str, *, source: str = "", name: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.source = source
        self.name = name


class NotFoundError(SourceError):
    """The object, bucket or folder does not exist. `is_bucket`: there is not even the bucket, which no
    write makes.
    """

    def __init__(
        self, message: str, *, source: str = "", name: str = "", hint: str = "", is_bucket: bool = False
    ) -> None:
        super().__init__(message, source=source, name=name, hint=hint)
        self.is_bucket = is_bucket


class AccessDeniedError(SourceError):
    """No credentials, wrong ones, or no permission. `may_be_absent`: the store answers the same for
    an object that does not exist, so the credentials themselves may be right.
    """

    def __init__(
        self, message: str, *, source: str = "", name: str = "", hint: str = "", may_be_absent: bool = False
    ) -> None:
        super().__init__(message, source=source, name=name, hint=hint)
        self.may_be_absent = may_be_absent


class UnavailableError(SourceError):
    """The store did not answer properly this time (network, 5xx, throttling). `retry_after_s` is
    the delay that it asked for.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str = "",
        name: str = "",
        hint: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, source=source, name=name, hint=hint)
        self.retry_after_s = retry_after_s


class ChangedError(SourceError):
    """The object was replaced or truncated while it was being read."""


class AlreadyExistsError(SourceError):
    """A conditional write found something there already; nothing was changed."""


class NoSpaceError(SourceError):
    """The store is full; what was being written has been removed."""


class SourceClosedError(SourceError):
    """The source was closed, so a read in flight was given up."""


class FormatError(TeneralError):
    """Input that its format does not allow. `where` names the file, tensor, part or key."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.where = where


class ManifestError(FormatError):
    """An artifact's manifest is damaged, hostile, or from a newer version."""


class CheckpointError(FormatError):
    """A safetensors file or a Hugging Face model directory is damaged, hostile or incomplete."""


class IntegrityError(FormatError):
    """Stored bytes differ from their digest, or decode to something else than declared. Nothing was
    used.
    """

    def __init__(
        self, message: str, *, where: str = "", expected: str = "", got: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.expected = expected
        self.got = got


class LoadError(TeneralError):
    """A load ended before all weights were there, through no fault of the store or of what it
    holds.
    """


class LoadCancelledError(LoadError):
    """The load was cancelled by its owner."""


class PartsUnavailableError(TeneralError):
    """Weights that are read on demand could not be read this time, or were wrong (`__cause__` says
    which). None of them was used; the load goes on, and the next attempt reads them again.
    """


class NativeLibraryError(TeneralError):
    """A library of the native core that does not load or does not fit the Python side."""


class InsufficientMemoryError(TeneralError):
    """Something does not fit; nothing was read or allocated. `available_bytes` is None when it is
    unknown.
    """

    def __init__(
        self, message: str, *, needed_bytes: int = 0, available_bytes: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


def memory_error(error: BaseException) -> InsufficientMemoryError | None:
    """The meaning of an error that is raised where the system gives a process no more memory or threads: a library
    that cannot be mapped, a thread that cannot start. None for all others.
    """
    import errno  # of few processes

    text = str(error)
    is_it = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    is_it |= isinstance(error, ImportError) and any(each in text for each in _UNMAPPED)
    is_it |= isinstance(error, RuntimeError) and "can't start new thread" in text
    if not is_it:
        return None
    return InsufficientMemoryError(
        f"the system gives this process no more memory, or no more threads: {type(error).__name__}: {text}",
        hint="Raise its limits (ulimit -v and -u, those of the container), or serve a smaller model.",
    )
