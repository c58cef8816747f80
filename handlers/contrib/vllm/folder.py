"""The local folder for vLLM: a model's configuration and tokenizer, without its weights.

Invariant: the files of a packed artifact are verified, and the returned address is pinned, so that
all workers load the matching weights, even if the artifact is replaced meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from ....loader.artifact import open_artifact, read_file
from ....loader.errors import CheckpointError
from ....loader.format.checkpoint_files import INDEX_SUFFIX, SUFFIX
from ....loader.format.limits import MANIFEST_NAME
from ....loader.format.tensor_digests import FILE_NAME as DIGESTS_NAME
from ....loader.sources.open import PIN_MARK, model_address, open_source, scheme_of, split_pin

CONFIG_NAME = "config.json"


class SmallFiles(NamedTuple):
    folder: Path
    address: str  # of the weights; pinned, where they are packed


def is_model_folder(address: str) -> bool:
    """True if vLLM can use the address directly: a local folder with a configuration, and not an
    artifact.
    """
    return os.path.isfile(os.path.join(address, CONFIG_NAME)) and not os.path.exists(
        os.path.join(address, MANIFEST_NAME)
    )


def write_small_files(address: str, cache_root: str | os.PathLike[str]) -> SmallFiles:
    """Write the small files of the model at `address` into a folder of its own below `cache_root`.

    Several processes may do so at once; existing files are replaced atomically. Raises
    `CheckpointError` without a config.json, `UsageError`, `NotFoundError`, `FormatError` and the
    source's errors.
    """
    url, digest = split_pin(model_address(address))
    source = open_source(url)
    try:
        manifest = open_artifact(source, digest=digest, without_base=True)
        files = {
            file.name: read_file(source, manifest, file.name)
            for file in manifest.files
            if file.name != DIGESTS_NAME and not file.name.endswith((SUFFIX, INDEX_SUFFIX))
        }
    finally:
        source.close()
    if CONFIG_NAME not in files:
        raise CheckpointError(
            f"the model has no {CONFIG_NAME}",
            where=source.url,
            hint="vLLM needs the directory as Hugging Face writes it; pack it again with its config.json.",
        )
    where = url if scheme_of(url) else os.path.abspath(os.path.expanduser(url))
    pinned = where if manifest.digest is None else f"{where}{PIN_MARK}{manifest.digest.hex()}"
    # vLLM caches compiled code by the folder's name, so the same model must have the same one.
    folder = Path(cache_root) / "teneral" / hashlib.sha256(pinned.encode()).hexdigest()[:16]
    for name, data in files.items():
        _write(folder / name, data)
    return SmallFiles(folder, pinned)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
