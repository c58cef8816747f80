"""Of which version each blob is, so that all that is read of it is of one."""

from __future__ import annotations

from ..format.manifest import Manifest
from ..sources import checks


class BlobVersions:
    """What the manifest says, or else the first answer. For all who read the same artifact; thread-safe."""

    def __init__(self, manifest: Manifest, source_url: str) -> None:
        self._manifest = manifest
        self._source_url = source_url
        self._versions = {
            number: blob.version for number, blob in enumerate(manifest.blobs) if blob.version is not None
        }

    def of(self, blob: int) -> str | None:
        """What to ask for; None before the first answer."""
        return self._versions.get(blob)

    def check(self, blob: int, version: str | None) -> None:
        """An answer was of this version; None: nobody looked. Raises `ChangedError` when others were of another.

        Threads that ask before any was answered cannot ask for a version. They find out here, before what they have
        read counts.
        """
        if version is None:
            return
        first = self._versions.setdefault(blob, version)  # atomic: one of them is the first
        if version != first:
            name = self._manifest.blobs[blob].name
            raise checks.changed(self._source_url, name, f"version {first} was expected, {version} is there")
