"""The Hub's cache on this machine, as `hf download` and Hugging Face's library write it.

    HF_HUB_CACHE/models--org--name/refs/main            the commit of a branch, when it was downloaded
                                   snapshots/COMMIT/…   links to the files' content

A model that is whole there is used, and the network is not: a start needs no round trip, and no Hub.
So a branch is as it was downloaded; `hf download` brings the newest. Reads the file system, and
writes nothing.
"""

from __future__ import annotations

import json
import os
import re

from ...errors import NotFoundError
from ..file.store import FileStore
from .address import HubAddress, HubSettings, is_commit
from .quantisation import choose_file

MAX_INDEX_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Each with what goes along: a program may have wanted the tokenizer alone, or the configuration.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CachedModel(FileStore):
    """A model in the cache, whose files are links to blobs that are called by their digests."""

    def stated_sha256(self, name: str) -> bytes | None:
        """The SHA-256 that the Hub stated of a large file as it was downloaded; None for others."""
        blob = os.path.basename(os.path.realpath(os.path.join(self.url, name)))
        return bytes.fromhex(blob) if _SHA256.fullmatch(blob) else None


def find_snapshot(address: HubAddress, settings: HubSettings) -> str | None:
    """The folder of the model in the cache; None where it is not there, or not whole.

    While offline an incomplete copy is used: a missing file is an error of its own.
    """
    folder = _snapshot_of(address, settings)
    if folder is None or not os.path.isdir(folder):
        return None
    return folder if settings.is_offline or _is_whole(folder, address.quantisation) else None


def not_cached(address: HubAddress, settings: HubSettings) -> NotFoundError:
    revision = [] if address.revision == "main" else ["--revision", address.revision]
    command = " ".join(["hf download", address.repo, *revision])
    return NotFoundError(
        f"{address.at(address.revision)} is not in the cache at {settings.cache}, and HF_HUB_OFFLINE is set",
        source=address.at(address.revision),
        hint=f"Unset HF_HUB_OFFLINE, or run {command} first.",
    )


def _snapshot_of(address: HubAddress, settings: HubSettings) -> str | None:
    repo = os.path.join(settings.cache, f"models--{address.repo.replace('/', '--')}")
    commit = address.revision
    if not address.is_pinned:
        try:
            with open(
                os.path.join(repo, "refs", address.revision), encoding="ascii", errors="replace"
            ) as file:
                commit = file.read(64).strip()
        except OSError:
            return None
    return os.path.join(repo, "snapshots", commit, address.folder) if is_commit(commit) else None


def _is_whole(folder: str, quantisation: str) -> bool:
    def has(name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name))

    if quantisation:
        try:
            return has(choose_file(os.listdir(folder), quantisation, where=folder))
        except NotFoundError:
            return False
    if has(_ADAPTER[0]):
        return has(_ADAPTER[1])
    has_weights = has(_WEIGHTS) or (has(_INDEX) and all(map(has, _shards(os.path.join(folder, _INDEX)))))
    return has_weights and has("config.json") and any(map(has, _TOKENIZERS))


def _shards(index: str) -> set[str]:
    """The files that the index names; one that there cannot be where it is damaged."""
    try:
        with open(index, "rb") as file:
            names = json.loads(file.read(MAX_INDEX_BYTES))["weight_map"].values()
        return {os.path.basename(name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {""}
