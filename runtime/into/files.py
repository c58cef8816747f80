"""All weights at an address as a dict of tensors: `load_file`, a replacement of
`safetensors.torch.load_file`.

The addresses of weights: an artifact, a model directory, or one safetensors file.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from typing import NamedTuple

import torch

from ...loader.artifact import open_artifact, open_model
from ...loader.errors import NotFoundError, UsageError
from ...loader.format.checkpoint import Checkpoint, StoredTensor, manifest_of
from ...loader.format.checkpoint_files import SUFFIX
from ...loader.format.manifest import Manifest
from ...loader.format.safetensors import read_header
from ...loader.load.load import WeightLoad
from ...loader.sources.base import Source, SourceOptions
from ...loader.sources.open import model_address, open_source, scheme_of, split_pin
from .slots import tensor_over

Address = str | os.PathLike[str]


class OpenedWeights(NamedTuple):
    """An open source and its manifest. The caller closes the source."""

    source: Source
    manifest: Manifest


def open_weights(
    address: Address, options: SourceOptions | None = None, base: Address | None = None
) -> OpenedWeights:
    """Read the manifest, or the safetensors headers, at an address; no weights. `base` is the
    artifact that it holds differences to, if it does.

    Raises `UsageError` for an invalid address, `NotFoundError`, `FormatError` for damaged files,
    and the source's own errors.
    """
    url, digest = split_pin(model_address(os.fspath(address)))
    folder, file_name = _split_file(url)
    if file_name and digest is not None:
        raise UsageError(
            f"{url} is one file, and only packed artifacts can be pinned",
            hint="Pack the model and give the artifact's folder, or remove the pin.",
        )
    options = options or SourceOptions()
    if base is not None:
        options = options._replace(base=os.fspath(base))
    if options.base is not None and file_name:
        raise UsageError(f"{url} is one file, which has no base", key="base", hint="Leave base out.")
    source = open_source(folder, options) if options.base is None else open_model(folder, options)
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


BACKENDS = ("mmap", "pread")  # of safetensors 0.8


def load_file(
    filename: Address,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    base: Address | None = None,
) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file, a model directory, or an artifact at any address.
    Blocks. `base` is the address of the artifact that a fine-tune's holds differences to.

    The tensors are contiguous and writable, and own their memory: the file may be removed or
    replaced. On the CPU they share one allocation, which is freed with the last of them; clone one
    that must outlive the others. Names that a packed artifact holds as one tensor share it. An
    integer device is a CUDA device, as in safetensors.

    `backend` exists for compatibility with safetensors: its values are accepted and change nothing.
    Files are never mapped, so that one on a networked disk is read in large pieces and not page by
    page.

    Raises `UsageError` for a backend that safetensors does not have either, `FileNotFoundError` for
    a missing local path, `CheckpointError` for a damaged or hostile file, `IntegrityError` for a
    packed artifact whose bytes have changed, `InsufficientMemoryError`, and the errors of the
    source.
    """
    if backend not in BACKENDS:
        raise UsageError(
            f"backend {backend!r} is not one that safetensors has: 'mmap' or 'pread'",
            key="backend",
            hint="Leave it out: it changes nothing about how Teneral reads.",
        )
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    try:
        opened = open_weights(filename, base=base)
    except NotFoundError as error:
        if scheme_of(os.fspath(filename)) or os.path.exists(filename):
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(filename)) from error
    source, manifest = opened
    with closing(source), WeightLoad(source, manifest) as load:
        stored = {tensor.index: tensor_over(load, tensor) for tensor in manifest.tensors}
        load.start()
        for group in manifest.groups:
            load.wait(group.index)
            if target.type != "cpu":
                stored.update({index: stored[index].to(target) for index in group.tensors})
        load.wait_checks()
        load.join()
    return {name: stored[tensor.index] for name, tensor in manifest.by_name.items()}
