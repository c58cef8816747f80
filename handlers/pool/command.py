"""`teneral pool check`: reads a pool file and prints what it describes, or what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from .codes import PoolFileError, PoolWarning
from .file import read_pool
from .values import Model, Pool

EXIT_USAGE = 2
Limits = Callable[
    [Pool, str], Sequence[PoolWarning]
]  # a platform's: returns warnings, raises `PoolFileError`


def check(
    file: str,
    *,
    platform: str | None = None,
    limits: Limits | None = None,
    strict: bool = False,
    as_json: bool,
) -> int:
    """Returns 0, or with `as_json` 2 for a file that cannot be used; else raises `PoolFileError`.

    `limits` checks those of `platform`. Warnings go to standard error; with `strict` the first one is raised.
    """
    try:
        pool = read_pool(file)
        warnings = tuple(limits(pool, platform)) if limits is not None and platform is not None else ()
        if strict and warnings:
            raise warnings[0].as_error()
    except PoolFileError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "errors": [error.as_json()], "warnings": []}, indent=2))
        return EXIT_USAGE
    if as_json:
        shown = [warning.as_json() for warning in warnings]
        print(json.dumps({"ok": True, "errors": [], "warnings": shown}, indent=2))
        return 0
    print_warnings(warnings)
    print(f"{file}: {len(pool.models)} model{'s' if len(pool.models) > 1 else ''}")
    for model in pool:
        print(f"  {_line(model)}")
    return 0


def print_warnings(warnings: Sequence[PoolWarning]) -> None:
    """To standard error, one a line."""
    for warning in warnings:
        print(f"teneral: warning: {warning}", file=sys.stderr)


def _line(model: Model) -> str:
    warm = f"{model.min_warm} to {model.max_instances} instances"
    buffer = f" and {model.buffer} spare while busy" if model.buffer else ""
    return f"{model.name}: {warm}{buffer}, ended after {model.idle_timeout_s:g} s idle; {model.source}"
