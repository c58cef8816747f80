"""The results of commands, for people and for machines; the lines and exit codes of errors."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from .loader import errors as loading

OMITTED = frozenset({"manifest", "part"})  # `teneral inspect --json` has them


class Printable(Protocol):
    def render(self) -> str: ...


def print_result(result: Printable, *, as_json: bool) -> None:
    """Print a command's result: lines for people, or a JSON object of its fields. Bytes are in hexadecimal."""
    if not as_json:
        print(result.render())
        return
    import json  # few ask for it, and `serve` imports this module

    print(json.dumps(_plain(result), indent=2))


def _plain(value: Any) -> Any:
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name)) for name in fields if name not in OMITTED}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# One table: errors become exit codes here and nowhere else. The first class that fits counts; documented in
# docs/cli.md.
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_CODES: tuple[tuple[type[loading.TeneralError], int], ...] = (
    (loading.UsageError, EXIT_USAGE),
    (loading.NotFoundError, 3),
    (loading.AccessDeniedError, 4),
    (loading.UnavailableError, 5),
    (loading.AlreadyExistsError, 6),
    (loading.NoSpaceError, 7),
    (loading.IntegrityError, 8),
    (loading.ManifestError, 9),
    (loading.CheckpointError, 10),
    (loading.ChangedError, 11),
    (loading.NativeLibraryError, 12),
    (loading.InsufficientMemoryError, 16),
    (loading.LoadError, 17),
    (loading.SourceError, 5),
    (loading.FormatError, 9),
)
EXIT_CODES_BY_NAME = {  # classes of the runtime, by name so that `teneral pack` need not import it
    "ModelBrokenError": 75,  # a batch job's: worth another run, elsewhere
    "JobRetryError": 75,
    "ModelError": 12,
    "PortInUseError": 13,
    "DeviceLostError": 18,
    "HandlerError": 14,
    "CancelledError": 14,  # the handler's time was up
    "RequestError": 15,
    "ContextLengthError": 15,
}


def report_error(error: loading.TeneralError) -> int:
    """Say it to the person at the terminal. Returns the exit code that it means."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    # With its end in one write: other processes may write there, too.
    print(f"teneral: {error}{notes}\n", end="", file=sys.stderr)
    return exit_code(error)


def exit_code(error: loading.TeneralError) -> int:
    for kind in type(error).__mro__:
        if kind.__name__ in EXIT_CODES_BY_NAME:
            return EXIT_CODES_BY_NAME[kind.__name__]
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), EXIT_INTERNAL)
