"""The stories of docs/stories/: each a command that measures what its page tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report import where


def model_and_where(report: Mapping[str, Any]) -> str:
    """The sentence above a story's table."""
    wire_s = report["stored_bytes"] / report["rate_mb_s"] / 1e6
    size = f"{report['stored_bytes'] / 1e6:.0f} MB packed: {wire_s:.2f} s on a wire of {report['rate_mb_s']:g} MB/s"
    return f"A model of the shape of {report['model']} with random weights ({size}),\n{where(report)}:"
