"""The commands of `teneral pool` that read a file, or ask a running pool: check, status, promote and rollback.

`teneral pool check`: reads a pool file and prints what it describes, or what is wrong with it.

`teneral pool status`: a table of a running pool's models and instances, from its `/v1/pool`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from ...loader.errors import UnavailableError, UsageError
from ...runtime.config import PREFIX
from ..http.keys import parse_keys
from .file import read_pool
from .fitting import fitting_warnings
from .values import Model, Pool, PoolFileError, PoolWarning

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
    deep: bool = False,
    as_json: bool,
) -> int:
    """Returns 0, or 2 for a file that cannot be used, with all its errors on standard error, or as JSON.

    `limits` checks those of `platform`. Warnings go to standard error; with `strict` they are errors. `deep` asks the
    stores of the models.
    """
    try:
        pool = read_pool(file)
        warnings = tuple(limits(pool, platform)) if limits is not None and platform is not None else ()
        # An instance on a platform has memory of its own, and paths are those of its image.
        warnings += tuple(fitting_warnings(pool, deep=deep)) if platform is None or deep else ()
        if strict and warnings:
            error, *others = (warning.as_error() for warning in warnings)
            error.others = tuple(others)
            raise error
    except PoolFileError as error:
        errors = (error, *error.others)
        if as_json:
            report = {"ok": False, "errors": [each.as_json() for each in errors], "warnings": []}
            print(json.dumps(report, indent=2))
        for each in errors if not as_json else ():
            print(f"teneral: {each}", file=sys.stderr)
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


MAX_BYTES = 64 << 20
TIMEOUT_S = 10.0
PROMOTION_TIMEOUT_S = 660.0  # a version is started before it is promoted, within `queue_timeout_s`


def status(url: str, *, as_json: bool) -> int:
    """Prints it. Returns 0; raises `UsageError` or `UnavailableError` for an address without a pool."""
    pool = _ask(url, "/v1/pool")
    try:
        text = json.dumps(pool, indent=2) if as_json else render(pool)
    except (KeyError, TypeError) as error:
        raise _no_pool(url, error) from error
    print(text)
    return 0


def control(url: str, version: str, action: str) -> int:
    """Promote a version, `MODEL@VERSION`, or roll it back, and print which ones get requests. Returns 0; raises as
    `status`, and `UnavailableError` with the pool's reason where it refuses.
    """
    model = _ask(url, f"/v1/pool/{quote(version)}/{action}", method="POST", timeout_s=PROMOTION_TIMEOUT_S)
    try:
        names = [str(name) for name in model["targets"]]
    except (KeyError, TypeError) as error:
        raise _no_pool(url, error) from error
    print(f"requests without a version go to {', '.join(names)}")
    return 0


def _ask(url: str, path: str, *, method: str = "GET", timeout_s: float = TIMEOUT_S) -> Any:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not an address of a pool", key="url", hint="Give http://host:port.")
    headers = {}
    if key := os.environ.get(f"{PREFIX}API_KEY"):
        headers["Authorization"] = f"Bearer {parse_keys(key)[0]}"
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers, method=method)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - as above
            return json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        reason = _message_of(error)
        hint = "" if reason else "Give the address of a pool."
        if error.code == 401:
            hint = f"Set {PREFIX}API_KEY to the pool's key."
        message = f"{url} answers {error.code} {error.reason}{reason}"
        raise UnavailableError(message, source=url, hint=hint) from error
    except (OSError, ValueError) as error:
        raise _no_pool(url, error) from error


def _message_of(error: urllib.error.HTTPError) -> str:
    """The message in an error's body, where it is the pool's."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return f": {json.loads(error.read(MAX_BYTES))['error']['message']}"
    return ""


def _no_pool(url: str, error: Exception) -> UnavailableError:
    reason = getattr(error, "reason", error)  # urllib's errors have it, without their own names
    return UnavailableError(
        f"no pool answers at {url}: {reason}", source=url, hint="Start one: teneral pool run pool.toml"
    )


def render(pool: dict[str, Any]) -> str:
    """The table, and the memory below it."""
    rows = [("MODEL", "STATE", "READY", "STARTING", "DESIRED", "WAITING", "IN WORK", "MEMORY")]
    reasons = []
    for name, model in pool["models"].items():
        if not model["versions"]:
            rows.append((name, model["state"], "0", "0", "0", "0", "0", "0 MiB"))
        for version in model["versions"]:
            instances = version["instances"]
            rows.append(
                (
                    version["name"],
                    version["state"],
                    str(len(instances)),
                    str(version["starting"]),
                    str(version["desired"]),
                    str(version["waiting"]),
                    str(sum(each["in_work"] for each in instances)),
                    _mib(sum(each["memory_bytes"] for each in instances)),
                )
            )
            if version.get("reason"):
                reasons.append(f"{version['name']}: {version['reason']}")
        if model.get("trouble"):
            reasons.append(f"{name}: {model['trouble']}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    memory = pool["memory"]
    lines.append(
        f"memory: {_mib(memory['reserved_bytes'])} of {_mib(memory['budget_bytes'])} reserved, "
        f"{_mib(memory['used_bytes'])} used"
    )
    return "\n".join([*lines, *reasons])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
