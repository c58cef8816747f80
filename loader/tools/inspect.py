"""What an artifact, or a folder of plain safetensors, is made of: as a JSON-ready value and as a table for
people.

Works from the manifest alone and reads nothing. Sizes are bytes; ratios are shares of the original bytes, so
lower is smaller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..format.manifest import FORMAT_VERSION, Group, Manifest, Tier
from .progress_bar import format_bytes

SCHEMA = 1  # of the value that `describe` returns


def describe(manifest: Manifest, url: str) -> dict[str, Any]:
    """A JSON-ready value. Tied tensors count once, as they are stored. Plain safetensors have no `digest`."""
    groups = [_describe_group(manifest, group) for group in manifest.groups]
    digest = manifest.digest.hex() if manifest.digest is not None else None
    return {
        "schema": SCHEMA,
        "url": url,
        "format": f"teneral {FORMAT_VERSION}" if digest else "safetensors",
        "generator": manifest.generator,
        "digest": digest,
        "pin": f"{url}@b3:{digest}" if digest else None,
        "totals": _with_ratios({key: sum(group[key] for group in groups) for key in _SUMMED}),
        "dtypes": dict(Counter(tensor.dtype for tensor in manifest.tensors)),
        "encodings": dict(Counter(tensor.encoding.value for tensor in manifest.tensors)),
        "groups": groups,
        "parts": len(manifest.parts),
        "blobs": [{"name": blob.name, "bytes": blob.size_bytes} for blob in manifest.blobs],
        "files": [
            {
                "name": file.name,
                "bytes": file.size_bytes,
                "digest": file.digest.hex() if file.digest is not None else None,
            }
            for file in manifest.files
        ],
        "aliases": dict(manifest.aliases),
        "metadata": dict(manifest.metadata),
    }


_SUMMED = ("tensors", "elements", "raw_bytes", "draft_bytes", "refine_bytes")


def _describe_group(manifest: Manifest, group: Group) -> dict[str, Any]:
    tensors = [manifest.tensors[index] for index in group.tensors]
    stored = {tier: sum(part.size_bytes for part in manifest.parts_of(group.index, tier)) for tier in Tier}
    return _with_ratios(
        {
            "name": group.name,
            "tensors": len(tensors),
            "elements": sum(math.prod(tensor.shape) for tensor in tensors),
            "raw_bytes": sum(tensor.size_bytes for tensor in tensors),
            "draft_bytes": stored[Tier.DRAFT],
            "refine_bytes": stored[Tier.REFINE],
        }
    )


def _with_ratios(figures: dict[str, Any]) -> dict[str, Any]:
    stored_bytes = figures["draft_bytes"] + figures["refine_bytes"]
    raw_bytes = figures["raw_bytes"]
    return {
        **figures,
        "stored_bytes": stored_bytes,
        "draft_ratio": round(figures["draft_bytes"] / raw_bytes, 4) if raw_bytes else None,
        "stored_ratio": round(stored_bytes / raw_bytes, 4) if raw_bytes else None,
    }


_COLUMNS = ("group", "tensors", "elements", "raw", "draft", "refine", "draft/raw", "stored/raw")
_NUM_PLAIN_COLUMNS = 4


def render_table(description: Mapping[str, Any]) -> str:
    """What `describe` returned, for a terminal: a header, a row for each group, totals and files."""
    totals = description["totals"]
    rows: list[tuple[str, ...]] = [_COLUMNS]
    rows += [_row(group["name"], group) for group in description["groups"]]
    rows.append(_row("total", totals))
    if (
        description["digest"] is None
    ):  # nothing is split or coded: the other columns would only repeat this one
        rows = [row[:_NUM_PLAIN_COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_table_line(row, widths) for row in rows]
    rule = "─" * len(lines[0])
    return "\n".join([*_header(description), "", lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _header(description: Mapping[str, Any]) -> list[str]:
    files = ", ".join(f"{file['name']} ({format_bytes(file['bytes'])})" for file in description["files"])
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(description["dtypes"].items()))
    fields = {
        "artifact" if description["digest"] else "model": description["url"],
        "format": f"{description['format']}, written by {description['generator']}"
        if description["digest"]
        else "plain safetensors, not packed",
        "digest": f"b3:{description['digest']}" if description["digest"] else "",
        "tensors": dtypes,
        "stored": f"{description['parts']} parts in {len(description['blobs'])} blobs",
        "tied": ", ".join(f"{name} = {target}" for name, target in description["aliases"].items()),
        "files": files,
    }
    return [f"{name:9} {text}" for name, text in fields.items() if text]


def _row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{figures['tensors']:,}",
        f"{figures['elements']:,}",
        format_bytes(figures["raw_bytes"]),
        format_bytes(figures["draft_bytes"]),
        format_bytes(figures["refine_bytes"]),
        _percent(figures["draft_ratio"]),
        _percent(figures["stored_ratio"]),
    )


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _table_line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        row[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
    ]
    return "  ".join(cells).rstrip()
