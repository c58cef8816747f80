"""The addresses of weights: an artifact, a model directory, or one safetensors file."""

from __future__ import annotations

import os
from typing import NamedTuple

from ...loader.artifact import open_artifact
from ...loader.errors import UsageError
from ...loader.format.checkpoint import SUFFIX, Checkpoint, StoredTensor, manifest_of
from ...loader.format.manifest import Manifest
from ...loader.format.safetensors import read_header
from ...loader.pin import split_pin
from ...loader.sources.base import Source, SourceOptions
from ...loader.sources.open import open_source, scheme_of

Address = str | os.PathLike[str]


class OpenedWeights(NamedTuple):
    """An open source and its manifest. The caller closes the source."""

    source: Source
    manifest: Manifest


def open_weights(address: Address, options: SourceOptions | None = None) -> OpenedWeights:
    """Read the manifest, or the safetensors headers, at an address; no weights.

    Raises `UsageError` for an invalid address, `NotFoundError`, `FormatError` for damaged files,
    and the source's own errors.
    """
    url, digest = split_pin(os.fspath(address))
    folder, file_name = _split_file(url)
    if file_name and digest is not None:
        raise UsageError(
            f"{url} is one file, and only packed artifacts can be pinned",
            hint="Pack the model and give the artifact's folder, or remove the pin.",
        )
    source = open_source(folder, options)
    try:
        manifest = _read_file(source, file_name) if file_name else open_artifact(source, digest=digest)
    except BaseException:
        source.close()
        raise
    return OpenedWeights(source, manifest)


def _split_file(url: str) -> tuple[str, str]:
    """The folder, and the name of the one file in it; '' for the folder as a whole."""
    if scheme_of(url):
        folder, _, name = url.rpartition("/")
        return (folder, name) if name.endswith(SUFFIX) else (url, "")
    path = os.path.expanduser(url)
    if os.path.isfile(path) or (path.endswith(SUFFIX) and not os.path.isdir(path)):
        folder, name = os.path.split(path)
        return folder or os.curdir, name
    return url, ""


def _read_file(source: Source, name: str) -> Manifest:
    info = source.stat(name)
    header = read_header(source, info)
    tensors = {entry.name: StoredTensor(entry, shard=0) for entry in header.entries.values()}
    return manifest_of(Checkpoint(source.url, (info,), tensors, files=(), metadata=header.metadata))
