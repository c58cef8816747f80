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
    from ..loader.sources.base import Source


ONNX_NAME = "onnx.json"  # of packed ONNX models: docs/onnx.md
MAX_LOOK_BYTES = 1 << 20  # of a manifest, whose files stand before its groups


def is_onnx(manifest: Manifest) -> bool:
    """True where the artifact holds a packed ONNX model."""
    return any(file.name == ONNX_NAME for file in manifest.files)


def seems_onnx(address: str) -> bool:
    """A look at a local folder: true where it seems to be such an artifact. Only a hint, for what is imported first."""
    path = address.partition("@b3:")[0].removeprefix("file://")
    try:
        with open(f"{path}/manifest.json", "rb") as file:
            return f'"{ONNX_NAME}"'.encode() in file.read(MAX_LOOK_BYTES)
    except (OSError, ValueError):
        return False


class ModelFiles:
    """Reads them, verified, from the node's cache where there is one, else from the store. Thread-safe."""

    def __init__(self, source: Source, manifest: Manifest, options: LoadOptions) -> None:
        self._source = source
        self._manifest = manifest
        self._names = {file.name for file in manifest.files}
        self._options = options

    def read(self, name: str) -> bytes | None:
        """The file's content; None when there is no such file. Raises as `read_file`."""
        if name not in self._names:
            return None
        cache = self._open_cache()
        data = read_file(self._source, self._manifest, name, cache=cache)
        if cache is not None:
            cache.finish()
        return data

    def json(self, name: str, *, required: bool = False) -> Any:
        """The file's value; None when there is no such file. Raises `CheckpointError` when it is no JSON, or is not
        there although it is `required`.
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
        from ..loader.cache.part_cache import PartCache  # most instances have none

        return PartCache(self._options.cache_dir, budget_bytes=self._options.cache_bytes)
