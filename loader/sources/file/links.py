"""Symbolic links that lead out of a model's folder, which packing refuses: a link to a secret would be
packed with the model.

A hub's cache is no such case: its `snapshots/REVISION/config.json` is a link to `../../blobs/DIGEST`.
"""

from __future__ import annotations

import os

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def leads_out(root: str, path: str) -> str | None:
    """The file behind `path` if it lies outside of the folder `root`; None if it is inside, or among the
    blobs of the hub's cache whose snapshot `root` is. Raises `OSError` for a link that leads nowhere.
    """
    target, folder = os.path.realpath(path, strict=True), os.path.realpath(root)
    allowed = [folder, *_blobs_of(folder)]
    return None if any(target.startswith(os.path.join(each, "")) for each in allowed) else target


def _blobs_of(folder: str) -> list[str]:
    """The blobs next to `snapshots/REVISION`, at or above the folder. Not resolved: no link can move them."""
    above, _, inside = folder.rpartition(f"/{_SNAPSHOTS}/")
    return [os.path.join(above, _BLOBS)] if above and inside else []
