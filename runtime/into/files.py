"""`load_file`: all weights at an address as a dict of tensors; a replacement of
`safetensors.torch.load_file`.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing

import torch

from ...loader.errors import NotFoundError, UsageError
from ...loader.load.load import WeightLoad
from ...loader.sources.open import scheme_of
from .address import Address, open_weights
from .views import tensor_over

BACKENDS = ("mmap", "pread")  # of safetensors 0.8


def load_file(
    filename: Address, device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file, a model directory, or an artifact at any address.
    Blocks.

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
        opened = open_weights(filename)
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
        load.join()
    return {name: stored[tensor.index] for name, tensor in manifest.by_name.items()}
