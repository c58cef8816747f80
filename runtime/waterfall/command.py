"""`teneral timeline`: fetch or read a snapshot, and draw it in the terminal or into a page."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...loader.errors import FormatError, NotFoundError, UsageError
from ...loader.sources.base import SourceOptions
from ...loader.sources.open import open_source

MAX_SNAPSHOT_BYTES = 64 << 20
MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 40, 100, 400


def show_timeline(
    place: str,
    *,
    output: str | None,
    form: str | None,
    width: int | None,
    color: str,
    api_key: str | None,
    page: Callable[[dict[str, Any]], str],
) -> int:
    """Draw the snapshot at `place`, a server's address or a file. Prints it, or writes it to `output`.

    `form` is text, html or perfetto; None: html for an output, else text. `page` makes the HTML of a
    checked snapshot: it belongs to the handlers, which this folder does not know.
    """
    snapshot = read_snapshot(place, api_key)
    form = form or ("text" if output is None else "html")
    drawn = (
        _drawn_text(snapshot, width, color, output) if form == "text" else _drawn_file(snapshot, form, page)
    )
    if output is None:
        print(drawn)
    else:
        _write_page(Path(output), drawn if drawn.endswith("\n") else f"{drawn}\n")
        print(f"wrote {output}")
    return 0


def _drawn_file(snapshot: dict[str, Any], form: str, page: Callable[[dict[str, Any]], str]) -> str:
    from .exports import checked_snapshot, chrome_trace  # only when a file is asked for

    if form == "html":
        return page(checked_snapshot(snapshot))
    return json.dumps(chrome_trace(snapshot), separators=(",", ":"))


def _drawn_text(snapshot: dict[str, Any], width: int | None, color: str, output: str | None) -> str:
    from .view import render

    columns = width or shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    if not MIN_WIDTH <= columns <= MAX_WIDTH and width is not None:
        raise UsageError(f"--width must be from {MIN_WIDTH} to {MAX_WIDTH}", key="width")
    columns = min(max(columns, MIN_WIDTH), MAX_WIDTH)
    is_terminal = output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    colored = color == "always" or (color == "auto" and is_terminal)
    return render(snapshot, width=columns, color=colored)


def read_snapshot(place: str, api_key: str | None = None) -> dict[str, Any]:
    """The snapshot at a server's address (`/timeline` is added where it has no path), or in a file.
    Bounded.
    """
    if place.startswith(("http://", "https://")):
        scheme, _, rest = place.rstrip("/").partition("://")
        folder, _, name = rest.rpartition("/") if "/" in rest else (rest, "", "timeline")
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        source = open_source(f"{scheme}://{folder}", SourceOptions(headers=headers, max_attempts=1))
        try:
            data, _ = source.read(name, max_bytes=MAX_SNAPSHOT_BYTES)
        finally:
            source.close()
    else:
        data = _read_file(Path(place))
    try:
        snapshot = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{place} is not JSON: {error}",
            where=place,
            hint="Give a server's address, or what its /timeline returned.",
        ) from error
    if not isinstance(snapshot, dict):
        raise FormatError(f"{place} is not a timeline", where=place)
    return snapshot


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SNAPSHOT_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            f"cannot read {path}: {error.strerror}",
            source=str(path),
            hint="Give a server's address (http://host:8080) or a file with what its /timeline returned.",
        ) from error
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise FormatError(f"{path} is larger than {MAX_SNAPSHOT_BYTES} bytes", where=str(path))
    return data


def _write_page(path: Path, page: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}", key="output") from error
