"""Errors of the runtime, under the loader's root `TeneralError`.

TeneralError
├── ModelError             the artifact is sound, but not a model that this version can run
├── RequestError           the caller's request is invalid; `param` names the field
│   ├── ContextLengthError
│   ├── AdapterError       … because its adapter is invalid, or does not fit this server
│   │   └── AdapterNotFoundError
│   ├── GrammarError       … because no answer can follow the grammar that it gives, within the bounds
│   └── RefusedError       … or must not be served, as a filter of the handler's decides; `code` says why
├── CapacityError          too much at once: try again after `retry_after_s`
│   └── HandlerBusyError   … because calls of the user's handler do not end
├── AdapterUnavailableError  an adapter's store did not give it this time: try again
├── CancelledError         the request was cancelled by its caller, or its client went away
├── DrainingError          the instance is shutting down
├── UnloadedError          the model was unloaded on request, or is being loaded: try again
├── TryAgainError          the work is not complete, and another attempt goes on with it
├── SnapshotError          a KV snapshot is damaged or hostile (a FormatError)
│   └── SnapshotMismatchError  … or was made for something else than it is to be used with
├── DeviceLostError        the device computes no more: the process must be started again
├── HandlerError           the user's handler is missing, of the wrong shape, or raised
│   └── ResultError        … or gave a value that cannot be sent
└── PortInUseError
"""

from __future__ import annotations

from collections.abc import Iterable

from ..loader.errors import FormatError, LoadError, SourceError, TeneralError

# Errors that ended a load: no later forward pass can succeed.
WEIGHTS_LOST = (SourceError, FormatError, LoadError)


class ModelError(TeneralError):
    """The model cannot be run: unknown architecture, missing tensor, wrong shape, unsupported
    option.
    """


def as_teneral_error(error: Exception) -> TeneralError:
    """The error itself, or a `ModelError` about it."""
    if isinstance(error, TeneralError):
        return error
    failure = ModelError(f"the model failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class DeviceLostError(TeneralError):
    """The device has failed, and no further work of this process can succeed on it."""


class RequestError(TeneralError):
    """An invalid request. `param` is the field as the caller wrote it, '' for the request as a
    whole.
    """

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the requested tokens, do not fit the context."""


class AdapterError(RequestError):
    """An adapter that is damaged, of an unsupported kind, made for another base, or larger than the server allows."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter of this name."""


class GrammarError(RequestError):
    """An invalid schema, regular expression or grammar, or one that exceeds its limits while it is
    matched.
    """


class RefusedError(RequestError):
    """A request refused by a handler's own filter. `code` distinguishes such refusals for clients."""

    def __init__(
        self, message: str, *, code: str = "content_refused", param: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, param=param, hint=hint)
        self.code = code


class CapacityError(TeneralError):
    """The instance is at its capacity limit. Nothing was started."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class HandlerBusyError(CapacityError):
    """The maximum of calls of the user's handler is running, including those whose clients have
    left.
    """


class AdapterUnavailableError(TeneralError):
    """An adapter could not be read this time. The base model and other adapters are not affected."""


class CancelledError(TeneralError):
    """The request was cancelled before it ended."""


class DrainingError(TeneralError):
    """The instance accepts no new work because it is shutting down."""


def shutting_down() -> DrainingError:
    return DrainingError("the instance is shutting down", hint="Use another instance.")


class UnloadedError(TeneralError):
    """The server has no model at the moment, on request. Nothing was started."""

    retry_after_s = 1.0


class TryAgainError(TeneralError):
    """The work is not complete, and another attempt continues it."""


class SnapshotError(FormatError):
    """A KV snapshot is damaged, hostile, or from a newer version. It was not used."""


class SnapshotMismatchError(SnapshotError):
    """A valid KV snapshot of another model, dtype, epoch, layout or block size."""


class HandlerError(TeneralError):
    """The user's handler could not be loaded, has the wrong shape, or raised (then `__cause__` is its
    exception).
    """


class ResultError(HandlerError):
    """The value of a user's handler is neither JSON nor text nor bytes."""


class PortInUseError(TeneralError):
    """The address to listen on is in use."""


def missing_tensor(name: str, present: Iterable[str]) -> ModelError:
    """The error for a missing tensor, with the most similar names."""
    import difflib  # only for an error message

    near = difflib.get_close_matches(name, list(present), n=2)
    return ModelError(
        f"the model has no tensor {name!r}",
        hint=f"Nearest names: {', '.join(near)}."
        if near
        else "Check that this artifact matches its config.json.",
    )
