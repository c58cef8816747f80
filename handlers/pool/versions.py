"""The served versions of one model: which deployment gets a request, and how new versions take the place of old ones.

A version is proven when an instance of it was ready once. A new version is pending until it is proven; the old ones
that are proven take the requests until then, and those that are not are forgotten as soon as another takes their place.
So a request without a version goes to a proven one wherever there is any. Used on the event loop only.
"""

from __future__ import annotations

import dataclasses
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
        self.file_model = model  # as the pool file has it; `model` has the traffic of a promotion
        self.paused = False  # refuses requests, until it is woken
        self.asleep = False  # starts nothing until a request comes
        self.trouble = ""  # why a version, or the whole model, is not served
        self._current: dict[Version, Deployment] = {}
        self._previous: list[Deployment] = []
        self._retired: list[Deployment] = []
        self._rejected: dict[tuple[Version, str], str] = {}
        self._promoted: Version = None

    def deployments(self) -> Iterator[Deployment]:
        """All that have, or may have, instances."""
        yield from list(self._current.values())
        yield from list(self._previous)
        yield from list(self._retired)

    def targets(self) -> list[Deployment]:
        """Those that get requests which name no version."""
        return [deployment for deployment in self._current.values() if deployment.is_target]

    def serving(self) -> list[Deployment]:
        """The targets, and what takes the requests of those that are pending."""
        found = [d for v in self._targets() if (d := self._in_place_of(v)) is not None]
        return found or [*self._proven(), *self.targets()][:1]

    @property
    def versions(self) -> list[int]:
        return sorted(version for version in self._current if version is not None)

    @property
    def promoted(self) -> Version:
        """The version that a client promoted, if it is in force."""
        return self._promoted

    def get(self, version: int) -> Deployment | None:
        return self._current.get(version)

    @property
    def rejected(self) -> Mapping[str, str]:
        """Reasons by version."""
        return {str(version): reason for (version, _), reason in self._rejected.items()}

    def choose(self, version: Version, key: str | None, chooser: Chooser) -> Deployment | None:
        """The deployment for a request. None when the version is not served, or nothing is."""
        if version is not None or not self.model.is_versioned:
            return self._in_place_of(version) or self._current.get(version)
        found = {d.release.version or 0: d for d in self.serving()}
        if not found:
            return None
        weights = {number: self.model.weights.get(number, 0) for number in found}
        if not any(weights.values()):
            return found[max(found)]
        return found[chooser.version(self.model.name, weights, key)]

    def stand_in(self, deployment: Deployment) -> Deployment | None:
        """Another version, which is proven, for a request without one that this deployment cannot start for."""
        return next((each for each in self._proven() if each is not deployment and not each.is_failing), None)

    def update(self, model: Model, releases: Sequence[tuple[Release, ServeConfig]]) -> None:
        """Serve these releases from now on, oldest first. Those that are served already go on as they are."""
        if model != self.file_model or self._promoted not in {release.version for release, _ in releases}:
            self._promoted = None
        self.file_model, self.model = model, self._with_promotion(model)
        is_proven = any(d.was_ready for d in self.deployments() if not d.retired)
        known = {_identity(d.release, d.config): d for d in self.deployments() if not d.retired}
        has_instances = any(d.servers for d in known.values())
        gaps = next((d.gaps for d in known.values() if d.is_target), IdleGaps())
        fresh: dict[Version, Deployment] = {}
        for release, config in releases:
            deployment = known.pop(_identity(release, config), None)
            if deployment is None:
                deployment = Deployment(self.model, release, config, gaps=gaps.copy())
                logger.info("%s: serving %s", deployment.name, release.address)
            deployment.model = self.model
            fresh[release.version] = deployment
        self._previous = [deployment for deployment in known.values() if deployment.was_ready]
        self._current = fresh
        self._mark_targets()
        for deployment in fresh.values():
            # Only what takes another's place is to be ready before it does. One of a model that sleeps is started by
            # its first request.
            is_new = deployment.is_target and not deployment.was_ready
            deployment.pending = is_new and (has_instances or (deployment.pending and is_proven))
        for deployment in known.values():
            if not deployment.was_ready:
                self._retire(deployment)

    def start_failed(self, deployment: Deployment) -> None:
        """Have proven versions take the requests, if there are any, until this one is ready."""
        if deployment.is_target and not deployment.was_ready and not deployment.retired:
            deployment.pending = any(each is not deployment for each in self._proven())

    def reject(self, deployment: Deployment, reason: str) -> bool:
        """Roll back: requests go to other versions, where there are any. Whether that is new."""
        identity = (deployment.release.version, deployment.release.revision)
        if deployment.retired or identity in self._rejected or not self.model.is_versioned:
            return False
        self._rejected[identity] = reason
        if deployment.release.version == self._promoted:
            self._promoted, self.model = None, self.file_model
        logger.warning("%s is not served any more: %s", deployment.name, reason)
        self._mark_targets()
        return True

    def forgive(self, version: Version = None) -> None:
        """Serve what was rejected again: this version, or all of them, where there is nothing else."""
        self._rejected = {
            each: why for each, why in self._rejected.items() if version is not None and each[0] != version
        }
        self._mark_targets()

    def promote(self, version: int) -> None:
        """Have this version, which should be proven, get all requests without one, from the next `update` on, until the
        file's entry changes or the version is not served any more.
        """
        self._promoted = version

    def restore(self, rejections: Mapping[tuple[Version, str], str]) -> None:
        """Have these, which `rejections` gave before, be rejected again, and no others."""
        self._rejected = dict(rejections)
        self._mark_targets()

    @property
    def rejections(self) -> Mapping[tuple[Version, str], str]:
        """Reasons by version and revision."""
        return dict(self._rejected)

    def settle(self) -> bool:
        """Retire the old versions once all that take their place are proven, and forget those that have ended. Whether
        any was.
        """
        has_retired = bool(self._previous) and all(d.was_ready for d in self.targets())
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

    def _with_promotion(self, model: Model) -> Model:
        if self._promoted is None:
            return model
        shadow = None if model.shadow and model.shadow.version == self._promoted else model.shadow
        return dataclasses.replace(model, traffic={self._promoted: 100}, shadow=shadow)

    def _targets(self) -> list[Version]:
        return [version for version, deployment in self._current.items() if deployment.is_target]

    def _in_place_of(self, version: Version) -> Deployment | None:
        """The deployment of a version: what was there before, while that which is there now is pending."""
        current = self._current.get(version)
        if current is not None and not current.pending:
            return current
        return next((d for d in self._previous if d.release.version == version), None)

    def _proven(self) -> list[Deployment]:
        """Those that were ready once and may get requests without a version, best first."""
        weights = self.model.weights
        served = [d for v, d in self._current.items() if not weights or weights.get(v or 0)]
        proven = [d for d in (*served, *self._previous) if d.was_ready]
        return sorted(proven, key=lambda d: (self._is_rejected(d), d.is_failing, -(d.release.version or 0)))

    def _retire(self, deployment: Deployment) -> None:
        deployment.retired = True
        self._retired.append(deployment)
        heirs = (*self._proven(), *self.targets())
        heir = self._in_place_of(deployment.release.version) or next(iter(heirs), None)
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
