"""A model's small files: its configuration, its tokenizer, the files of sentence-transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..loader.artifact import read_file
from ..loader.errors import CheckpointError

if TYPE_CHECKING:
    from ..loader.cache.part_cache import PartCache
    from ..loader.format.manifest import Manifest
    from ..loader.load.options import LoadOptions
    from ..loader.load.targets.shared import HeldFiles
    from ..loader.sources.base import Source


ONNX_NAME = "onnx.json"  # of packed ONNX models: docs/onnx.md
TOKENIZER_NAME = "tokenizer.json"
# Of a manifest, whose files come before its groups.
MAX_LOOK_BYTES = 1 << 20


def is_onnx(manifest: Manifest) -> bool:
    """True if the artifact holds a packed ONNX model."""
    return any(file.name == ONNX_NAME for file in manifest.files)


def seems_onnx(address: str, *, without_tokenizer: bool = False) -> bool:
    """True if a local folder seems to be such an artifact, and one without a tokenizer if that is asked. Only a hint,
    for what is imported and started first.
    """
    path = address.partition("@b3:")[0].removeprefix("file://")
    try:
        with open(f"{path}/manifest.json", "rb") as file:
            head = file.read(MAX_LOOK_BYTES)
    except (OSError, ValueError):
        return False
    has_tokenizer = f'"{TOKENIZER_NAME}"'.encode() in head
    return f'"{ONNX_NAME}"'.encode() in head and not (without_tokenizer and has_tokenizer)


class ModelFiles:
    """Verified reads of the files: from memory if they are held there, from the node's cache if
    there is one, else from the store. Thread-safe.
    """

    def __init__(
        self, source: Source, manifest: Manifest, options: LoadOptions, held: HeldFiles | None = None
    ) -> None:
        self._source = source
        self._manifest = manifest
        self._digests = {file.name: file.digest for file in manifest.files}
        self._options = options
        self._held = held

    def read(self, name: str) -> bytes | None:
        """The file's content; None if it does not exist. Raises the errors of `read_file`."""
        if name not in self._digests:
            return None
        if self._held is not None and (found := self._held.read(self._digests[name])) is not None:
            return found
        cache = self._open_cache()
        data = read_file(self._source, self._manifest, name, cache=cache)
        if cache is not None:
            cache.finish()
        return data

    def json(self, name: str, *, required: bool = False) -> Any:
        """The file's parsed JSON; None if it does not exist. Raises `CheckpointError` if it is not
        JSON, or missing although `required`.
        """
        data = self.read(name)
        if data is None:
            if required:
                raise CheckpointError(
                    f"the model has no {name}",
                    where=self._source.url,
                    hint="Serving needs the directory as Hugging Face writes it; pack it again with its config.json.",
                )
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{name} is not JSON: {error}", where=f"{self._source.url}/{name}"
            ) from error

    def _open_cache(self) -> PartCache | None:
        if self._options.cache_dir is None:
            return None
        # Most instances have none.
        from ..loader.cache.part_cache import PartCache

        return PartCache(self._options.cache_dir, budget_bytes=self._options.cache_bytes)
