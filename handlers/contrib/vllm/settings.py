"""The settings of `--model-loader-extra-config` for the load format `teneral`, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ....loader.errors import UsageError
from ....loader.load.options import MIB, LoadOptions
from ....loader.load.windows import DEFAULT_WINDOW_BYTES

ARTIFACT_KEY = "artifact"
_FLAG = "--model-loader-extra-config"
_MIN_MEMORY_BYTES, _MAX_MEMORY_BYTES = MIB, 1 << 50
_KINDS = {
    "artifact": str,
    "base": str,
    "share": bool,
    "memory_bytes": int,
    "connections": int,
    "cache_dir": str,
    "cache_bytes": int,
}


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The settings. Raises `UsageError` for invalid values."""

    artifact: str | None = None  # the weights' address; None: the model's own path
    base: str | None = None  # the address of the artifact that the weights are differences to
    # Workers of a tensor-parallel group share the reads: each weight is read once.
    share: bool = True
    # For weights on their way into the model, for each worker.
    memory_bytes: int = 2 * DEFAULT_WINDOW_BYTES
    connections: int | None = None
    cache_dir: str | None = None  # the node's cache of verified parts
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if not _MIN_MEMORY_BYTES <= self.memory_bytes <= _MAX_MEMORY_BYTES:
            raise UsageError(
                f"memory_bytes must be between {_MIN_MEMORY_BYTES} and {_MAX_MEMORY_BYTES}, not {self.memory_bytes}",
                key="memory_bytes",
            )
        _ = self.load_options  # checks the other fields

    @property
    def load_options(self) -> LoadOptions:
        chosen = {
            key: value
            for key in ("connections", "cache_dir", "cache_bytes")
            if (value := getattr(self, key)) is not None
        }
        return LoadOptions(**chosen)


def parse_settings(extra: Mapping[str, Any] | None) -> LoaderSettings:
    """Parse the extra config. Raises `UsageError` for unknown keys and values of the wrong type."""
    given = dict(extra or {})
    known = [field.name for field in fields(LoaderSettings)]
    for key, value in given.items():
        if key not in known:
            raise UsageError(
                f"{_FLAG}: {key!r} is not a key of the load format teneral",
                key=key,
                hint=f"Known keys are {', '.join(known)}.",
            )
        kind = _KINDS[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UsageError(f"{_FLAG}: {key} must be a {kind.__name__}, not {value!r}", key=key)
    return LoaderSettings(**given)
