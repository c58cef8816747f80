"""Warnings of `teneral pool check`: sources that are not there, and a node that is too small for what the file wants of
it.

Without `deep` it looks at this machine's folders alone, and counts what an instance needs at least; with it, the stores
are asked. Blocks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

from ...loader.errors import TeneralError
from ...loader.sources.open import scheme_of
from ...runtime.config import ServeConfig
from .deployment import Deployment
from .process import DEFAULT_KV_BYTES, standby_bytes
from .repository import Release, ReleaseRepository, absolute
from .values import Code, Model, Pool, PoolWarning


def fitting_warnings(pool: Pool, *, deep: bool = False) -> Iterator[PoolWarning]:
    """Warnings about sources (W6) and memory (W7). Never raises what a store raises."""
    repository = ReleaseRepository(pool.folder)
    needs: dict[str, int] = {}
    for model in pool:
        trouble, release = _found(pool, repository, model, deep=deep)
        if trouble:
            yield pool.warning(Code.W6, trouble, "models", model.name, "source")
        needs[model.name] = _need_bytes(model, release or Release(None, model.source, "", 0, has_kv=False))
    base = None
    if pool.node.standby_base is not None and deep:
        try:
            base = repository.standby_base(pool.node)
        except TeneralError as error:
            yield pool.warning(Code.W6, f"cannot be used: {error.message}", "node", "standby_base")
    yield from _memory_warnings(pool, needs, standby_bytes(pool.node, base), at_least=not deep)
    for trouble in crowded_devices((model, model.min_warm) for model in pool):
        yield pool.warning(Code.W7, trouble, "models")


def crowded_devices(warm: Iterable[tuple[Model, int]]) -> Iterator[str]:
    """The faults of devices of whose memory warm instances would take too much, by models and their numbers."""
    taken: Counter[str] = Counter()
    for model, number in warm:
        if (share := model.device_share) is not None:
            taken[share.device] += number * share.percent
    for device, percent in sorted(taken.items()):
        if percent > 100:
            yield f"take {percent} percent of {device} where all their min_warm instances run"


def _found(
    pool: Pool, repository: ReleaseRepository, model: Model, *, deep: bool
) -> tuple[str, Release | None]:
    """The fault of a model's source, and the newest of its releases, where it was looked at."""
    if deep:
        try:
            releases, trouble = repository.releases(model)
            return trouble, releases[-1]
        except TeneralError as error:
            return f"cannot be served: {error.message}", None
    if not scheme_of(model.source):
        folder = absolute(pool.folder, model.source.partition("{version}")[0])
        if not os.path.exists(folder.rpartition("/")[0] if model.is_versioned else folder):
            return f"is not there: {folder}", None
    return "", None


def _need_bytes(model: Model, release: Release) -> int:
    settings = {"kv_bytes": DEFAULT_KV_BYTES, **model.serve}
    return Deployment(
        model, release, ServeConfig(model=release.address, platform="http", **settings)
    ).need_bytes


def _memory_warnings(
    pool: Pool, needs: dict[str, int], kept_bytes: int, *, at_least: bool
) -> Iterator[PoolWarning]:
    memory_bytes = pool.node.memory_bytes
    if memory_bytes is None:
        return
    place = ("node", "memory")
    more = "at least " if at_least else ""
    for name, need_bytes in needs.items():
        if need_bytes + kept_bytes > memory_bytes:
            yield pool.warning(
                Code.W7,
                f"is {memory_bytes >> 20:,} MiB, but one instance of {name} needs {more}{need_bytes >> 20:,} MiB"
                + (f", and standby processes {kept_bytes >> 20:,} MiB" if kept_bytes else ""),
                *place,
            )
    warm = [model for model in pool if model.min_warm]
    warm_bytes = sum(model.min_warm * needs[model.name] for model in warm) + kept_bytes
    if warm_bytes > memory_bytes:
        parts = ", ".join(f"{m.min_warm} × {needs[m.name] >> 20:,} MiB of {m.name}" for m in warm)
        yield pool.warning(
            Code.W7,
            f"is {memory_bytes >> 20:,} MiB, but what is to be warm needs {more}{warm_bytes >> 20:,} MiB: {parts}",
            *place,
        )
