"""The served versions of one model: which deployment gets a request, and how new versions take the place of old ones.

A new version is pending until its first instance is ready; the old one takes the requests until then. Used on the event
loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from ...loader.errors import TeneralError
from ...runtime.config import ServeConfig
from .deployment import Deployment
from .policy import IdleGaps
from .repository import Release
from .routing import Chooser
from .values import Model

logger = logging.getLogger("teneral.pool")
Version = int | None


class ModelState:
    """One model of a running pool."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.paused = False  # refuses requests, until it is woken
        self.asleep = False  # starts nothing until a request comes
        self.trouble = ""  # why a version, or the whole model, is not served
        self._current: dict[Version, Deployment] = {}
        self._previous: list[Deployment] = []
        self._retired: list[Deployment] = []
        self._rejected: dict[tuple[Version, str], str] = {}

    def deployments(self) -> Iterator[Deployment]:
        """All that have, or may have, instances."""
        yield from list(self._current.values())
        yield from list(self._previous)
        yield from list(self._retired)

    def targets(self) -> list[Deployment]:
        """Those that get requests which name no version."""
        return [deployment for deployment in self._current.values() if deployment.is_target]

    @property
    def versions(self) -> list[int]:
        return sorted(version for version in self._current if version is not None)

    @property
    def rejected(self) -> Mapping[str, str]:
        """Reasons by version."""
        return {str(version): reason for (version, _), reason in self._rejected.items()}

    def choose(self, version: Version, key: str | None, chooser: Chooser) -> Deployment | None:
        """The deployment for a request. None when the version is not served, or nothing is."""
        usable = self._usable()
        if version is not None or not self.model.is_versioned:
            return usable.get(version)
        weights = {number: self.model.weights.get(number, 0) for number in usable if number is not None}
        if not any(weights.values()):
            healthy = [number for number in weights if not self._is_rejected(usable[number])]
            newest = max(healthy or weights, default=None)
            return None if newest is None else usable[newest]
        good = {n: weight for n, weight in weights.items() if weight and not self._is_rejected(usable[n])}
        return usable[chooser.version(self.model.name, good or weights, key)]

    def update(self, model: Model, releases: Sequence[tuple[Release, ServeConfig]]) -> None:
        """Serve these releases from now on, oldest first. Those that are served already go on as they are."""
        self.model = model
        known = {_identity(d.release, d.config): d for d in self.deployments() if not d.retired}
        has_instances = any(d.servers for d in known.values())
        gaps = next((d.gaps for d in known.values() if d.is_target), IdleGaps())
        fresh: dict[Version, Deployment] = {}
        for release, config in releases:
            deployment = known.pop(_identity(release, config), None)
            if deployment is None:
                deployment = Deployment(model, release, config, pending=has_instances, gaps=gaps.copy())
                logger.info("%s: serving %s", deployment.name, release.address)
            deployment.model = model
            fresh[release.version] = deployment
        self._previous = list(known.values())
        self._current = fresh
        self._mark_targets()
        for deployment in fresh.values():
            # Only what takes another's place is to be ready before it does.
            deployment.pending = deployment.pending and deployment.is_target and not deployment.servers

    def reject(self, deployment: Deployment, reason: str) -> bool:
        """Roll back: requests go to other versions, where there are any. Whether that is new."""
        identity = (deployment.release.version, deployment.release.revision)
        if deployment.retired or identity in self._rejected or not self.model.is_versioned:
            return False
        self._rejected[identity] = reason
        logger.warning("%s is not served any more: %s", deployment.name, reason)
        self._mark_targets()
        return True

    def forgive(self) -> None:
        """Serve what was rejected again: there is nothing else."""
        self._rejected.clear()
        self._mark_targets()

    @property
    def rejected_releases(self) -> frozenset[tuple[Version, str]]:
        """Versions and revisions."""
        return frozenset(self._rejected)

    def settle(self) -> bool:
        """Retire the old versions once no new one is pending, and forget those that have ended. Whether any was."""
        has_retired = bool(self._previous) and not any(d.pending for d in self._current.values())
        if has_retired:
            for deployment in self._previous:
                self._retire(deployment)
            self._previous = []
        self._retired = [d for d in self._retired if d.servers or d.starting]
        return has_retired

    def end(self, error: TeneralError) -> None:
        """The model is not in the pool any more."""
        self._previous += self._current.values()
        self._current = {}
        for deployment in self._previous:
            deployment.refuse_waiting(error)
        self.settle()

    def _usable(self) -> dict[Version, Deployment]:
        """Deployments by version, those that are ready in place of pending ones."""
        usable = {v: d for v, d in self._current.items() if not d.pending}
        for deployment in self._previous:
            usable.setdefault(deployment.release.version, deployment)
        return usable or dict(self._current)

    def _retire(self, deployment: Deployment) -> None:
        deployment.retired = True
        self._retired.append(deployment)
        heir = self._current.get(deployment.release.version) or next(iter(self.targets()), None)
        if heir is not None:
            heir.waiting.extend(deployment.waiting)
            deployment.waiting.clear()
        for task in list(deployment.starting.values()):
            task.cancel()

    def _mark_targets(self) -> None:
        weights = self.model.weights
        named = {v: d for v, d in self._current.items() if weights.get(v or 0) and not self._is_rejected(d)}
        if not named:
            healthy = {v: d for v, d in self._current.items() if not self._is_rejected(d)} or self._current
            newest = max(healthy, key=lambda version: version or 0, default=None)
            named = {newest: healthy[newest]} if newest in healthy else {}
        for version, deployment in self._current.items():
            deployment.is_target = version in named

    def _is_rejected(self, deployment: Deployment) -> bool:
        return (deployment.release.version, deployment.release.revision) in self._rejected


def _identity(release: Release, config: ServeConfig) -> tuple[Version, str, str, ServeConfig]:
    return release.version, release.address, release.revision, config
