"""Rendered documents, and the rendering that collects them: one pool file, one platform.

A renderer is a pure function of a `Rendering`: it returns documents, raises `PoolFileError` for what the platform
cannot do (E5–E7) and calls `warn` for what it does not do exactly (W1–W3). It reads no files and no stores; sizes of
weights come with the rendering where the command has read them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...handlers.pool.values import Code, Model, Pool, PoolFileError, PoolWarning

MAX_NAME_CHARS = 40  # of a deployment's name: platforms add suffixes of their own, up to 63
SCRATCH_BYTES = 1 << 30  # for temporary files of a read-only container


@dataclass(frozen=True, slots=True)
class RenderedDocument:
    """One document. `kind` and `name` are what a `[[patch]]` selects by; `file` is its name in a folder."""

    kind: str
    name: str
    body: Mapping[str, Any]
    file: str


@dataclass(frozen=True, slots=True)
class Options:
    """The surroundings that a pool file does not describe, with names that `[[patch]]` can change as well."""

    project: str = ""  # Google Cloud's; without one, the service runs as the project's default account
    prometheus: str = "http://prometheus.monitoring.svc:9090"
    gateway: str = "teneral"  # of the Gateway that splits traffic among versions
    ray_zero: bool = False  # under Ray no replica stays where min_warm is 0


class ModelSize(NamedTuple):
    """The largest of a model's versions. `has_kv`: it generates, so that it needs a KV pool."""

    weight_bytes: int  # decoded
    has_kv: bool


@dataclass(slots=True)
class Rendering:
    """One pool on its way to one platform. `sizes` has models whose manifests were read."""

    pool: Pool
    platform: str
    options: Options = Options()
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)
    warnings: list[PoolWarning] = field(default_factory=list)

    def warn(self, code: Code, model: Model, key: str, message: str, *, always: bool = False) -> None:
        """A warning about a key of the model, if the file sets it or `always`; once."""
        if always or key in model.given:
            warning = self.pool.warning(code, message, "models", model.name, *key.split("."))
            if warning not in self.warnings:
                self.warnings.append(warning)

    def error(self, code: Code, model: Model, key: str, message: str, *, hint: str = "") -> PoolFileError:
        return self.pool.error(code, message, "models", model.name, *key.split("."), hint=hint)


def resource_names(names: tuple[str, ...]) -> dict[str, str]:
    """Model names as names that every platform takes: lower case, digits and hyphens, a letter first, at most
    `MAX_NAME_CHARS`. Names that would be equal, or are too long, end in a digest of what they were.
    """
    plain = {name: _hyphened(name) for name in names}
    taken = list(plain.values())
    return {
        name: short if taken.count(short) == 1 and len(short) <= MAX_NAME_CHARS else with_digest(short, name)
        for name, short in plain.items()
    }


def _hyphened(name: str) -> str:
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
    return short if short[0].isalpha() else f"m-{short}"


def with_digest(short: str, name: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """`short`, of which as much stays as fits, and a digest of `name`."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{short[: max_chars - 9].rstrip('-')}-{digest}"
