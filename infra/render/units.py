"""Units: one version of one model as one thing to deploy, with its address, environment, size and instances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...handlers.pool.values import Code, Model
from .documents import Rendering, resource_names
from .limits import MAX_VERSIONS

MIB = 1 << 20
# Besides the weights: the interpreter and what it imports, the ring of bytes in flight, and the KV pool.
PROCESS_BYTES = 600 * MIB
STAGING_BYTES = 96 * MIB
KV_BYTES = 256 * MIB  # where neither the file nor a flag says how much
MEMORY_STEP_BYTES = 256 * MIB
DRAIN_S = 25.0  # for running requests after SIGTERM, where this program sets the time and the file does not


@dataclass(frozen=True, slots=True)
class Unit:
    """One version of one model. `weight` is its percentage of the model's traffic; sizes are bytes.

    `secrets` are variables of the container, by name, and the keys that their values have in a store of secrets.
    """

    model: Model
    version: int | None
    base: str  # the model's name as a resource
    name: str  # the same, and the version where there are several
    address: str
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    image: str
    cpu: float
    memory_bytes: int
    disk_bytes: int
    gpu: int
    weight: int
    min_warm: int
    max_instances: int

    @property
    def drain_s(self) -> float:
        """Time for running requests after SIGTERM."""
        return DRAIN_S if self.model.drain_s is None else self.model.drain_s


def units_of(
    rendering: Rendering, model: Model, *, platform_setting: str = "", sets_drain: bool = False
) -> list[Unit]:
    """The model's units, oldest version first. Raises E5 for versions that cannot be known or divided, E2 for an
    instance without a size and E6 for one in which the weights do not fit.

    `platform_setting` is for platforms that a container does not recognise, `sets_drain` for those on which it is this
    program that sets the time between SIGTERM and the end.
    """
    versions = _versions(rendering, model)
    weights = _weights(model, versions)
    memory_bytes = _memory_bytes(rendering, model)
    image, cpu = model.instance.image, model.instance.cpu
    if image is None:
        raise _needed(rendering, model, "image", 'image = "registry/teneral@sha256:…"')
    if cpu is None:
        raise _needed(rendering, model, "cpu", "cpu = 2")
    names = resource_names(tuple(rendering.pool.models))
    base = names[model.name]
    several = len(versions) > 1
    return [
        Unit(
            model=model,
            version=version,
            base=base,
            name=f"{base}-v{version}" if several else base,
            address=model.address(version),
            environment=_environment(model, version, platform_setting, sets_drain),
            secrets={f"TENERAL_{name.upper()}": variable for name, variable in sorted(model.secrets.items())},
            image=image,
            cpu=cpu,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes(model),
            gpu=model.instance.gpu,
            weight=weights.get(version, 0),
            min_warm=_share(model.min_warm, weights.get(version, 0)),
            max_instances=max(1, _share(model.max_instances, weights.get(version, 0))),
        )
        for version in versions
    ]


def _versions(rendering: Rendering, model: Model) -> tuple[int | None, ...]:
    if not model.is_versioned:
        return (None,)
    named = model.named_versions()
    if not named:
        raise rendering.error(
            Code.E5,
            model,
            "versions",
            "names no versions, and only `teneral pool run` looks for the newest while it runs",
            hint="Name them: versions = [8], or traffic with a weight for each.",
        )
    limit = MAX_VERSIONS[rendering.platform]
    if len(named) > limit:
        raise rendering.error(
            Code.E5,
            model,
            "traffic" if model.traffic else "versions",
            f"names {len(named)} versions; {rendering.platform} divides traffic among at most {limit}",
        )
    return named


def _weights(model: Model, versions: tuple[int | None, ...]) -> dict[int | None, int]:
    weights: dict[int | None, int] = {}
    weights.update(model.weights.items())
    return weights or {versions[-1]: 100}


def _share(instances: int, weight: int) -> int:
    """Of a model's instances, those of a version with this percentage of its traffic; rounded up."""
    return math.ceil(instances * weight / 100)


def _environment(
    model: Model, version: int | None, platform_setting: str, sets_drain: bool
) -> dict[str, str]:
    variables = {
        "TENERAL_MODEL": model.address(version),
        "TENERAL_MAX_WAIT_S": str(model.queue_timeout_s),
        **({"TENERAL_DRAIN_TIMEOUT_S": str(DRAIN_S)} if sets_drain else {}),
        **model.serve_environment(),
    }
    if platform_setting:
        variables["TENERAL_PLATFORM"] = platform_setting
    return dict(sorted(variables.items()))


def disk_bytes(model: Model) -> int:
    """The files that the model's settings let an instance keep: verified parts, and KV blocks."""
    settings = model.serve_settings()
    cache = int(settings.get("cache_bytes", 20 << 30)) if settings.get("cache_dir") else 0
    return cache + (int(settings.get("kv_disk_bytes") or 0) if settings.get("kv_disk_dir") else 0)


def needed_bytes(model: Model, weight_bytes: int) -> int:
    """The least memory of an instance: the weights, the KV pool, bytes in flight and the process."""
    kv_bytes = int(model.serve.get("kv_bytes") or KV_BYTES) + int(model.serve.get("kv_host_bytes") or 0)
    staging = int(model.serve.get("staging_bytes") or STAGING_BYTES)
    return weight_bytes + kv_bytes + staging + PROCESS_BYTES


def _memory_bytes(rendering: Rendering, model: Model) -> int:
    given, weights = model.instance.memory_bytes, rendering.weight_bytes.get(model.name)
    if weights is None:
        if given is None:
            raise _needed(
                rendering, model, "memory", 'memory = "4GiB", or --read-manifests to take it from the model'
            )
        return given
    least = needed_bytes(model, weights)
    if given is None:
        return -(-least // MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
    if given < least:
        raise rendering.error(
            Code.E6,
            model,
            "instance.memory",
            f"is {given / MIB:,.0f} MiB; the weights ({weights / MIB:,.0f} MiB), the KV pool and the process need "
            f"{least / MIB:,.0f} MiB",
        )
    return given


def _needed(rendering: Rendering, model: Model, key: str, example: str) -> Exception:
    return rendering.error(
        Code.E2,
        model,
        f"instance.{key}",
        "is needed to render",
        hint=f"Write it below [instance]: {example}.",
    )
