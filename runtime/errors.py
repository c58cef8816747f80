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

from ..loader.errors import FormatError, LoadError, SourceError, TeneralError

# What ended a load: no later forward pass can mend it.
WEIGHTS_LOST = (SourceError, FormatError, LoadError)


class ModelError(TeneralError):
    """The model cannot be run: unknown architecture, missing tensor, wrong shape, unsupported option."""


class DeviceLostError(TeneralError):
    """The device that computes has failed, and nothing that this process asks of it can succeed."""


class RequestError(TeneralError):
    """An invalid request. `param` is the field as the caller wrote it, '' for the request as a
    whole.
    """

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit the context."""


class AdapterError(RequestError):
    """An adapter that is damaged, of an unsupported kind, made for another base, or larger than the server allows."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter of this name."""


class GrammarError(RequestError):
    """A schema, regular expression or grammar that is wrong, or goes over its limits while it is followed."""


class RefusedError(RequestError):
    """A request that a handler's own filter turns away. `code` is what its clients tell such refusals apart by."""

    def __init__(
        self, message: str, *, code: str = "content_refused", param: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, param=param, hint=hint)
        self.code = code


class CapacityError(TeneralError):
    """The instance has as much to do as it allows itself. Nothing was begun."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class HandlerBusyError(CapacityError):
    """As many calls of the user's handler run as may, those included whose callers have left."""


class AdapterUnavailableError(TeneralError):
    """An adapter could not be read this time. The base and other adapters are not concerned."""


class CancelledError(TeneralError):
    """The request was cancelled before it ended."""


class DrainingError(TeneralError):
    """The instance takes no new work because it is shutting down."""


class UnloadedError(TeneralError):
    """The server has no model at the moment, on request. Nothing was begun."""

    retry_after_s = 1.0


class TryAgainError(TeneralError):
    """The work is not complete, and another attempt goes on with it."""


class SnapshotError(FormatError):
    """A KV snapshot is damaged, hostile, or from a newer version. Nothing of it was used."""


class SnapshotMismatchError(SnapshotError):
    """A sound KV snapshot of another model, dtype, epoch, layout or block size."""


class HandlerError(TeneralError):
    """The user's handler could not be loaded, has the wrong shape, or raised (then `__cause__` is its
    exception).
    """


class ResultError(HandlerError):
    """The value of a user's handler is neither JSON nor text nor bytes."""


class PortInUseError(TeneralError):
    """The address to listen on is taken."""
