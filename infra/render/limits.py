"""Units, one version of one model as one thing to deploy, and each platform's limits on them as data.

A unit has an address, an environment, a size and its instances. A limit has the place where it is documented and
the day it was read. A value beyond it is refused (E6), because the platform would refuse it later or, worse, do
something else in silence; keys without a counterpart on a platform are listed, too. Limits that join several values
(Fargate's pairs of CPU and memory) are in the platform's own file.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...handlers.pool.values import Code, Model
from .documents import ModelSize, Rendering, resource_names

READ = "2026-11-23"  # the day on which all of these pages were read
MIB = 1 << 20
# Besides the weights: the interpreter and what it imports, the ring of bytes in flight, and the KV pool.
PROCESS_BYTES = 600 * MIB
STAGING_BYTES = 96 * MIB
KV_BYTES = 256 * MIB  # where neither the file nor a flag says how much
MEMORY_STEP_BYTES = 256 * MIB
DRAIN_S = 25.0  # for running requests after SIGTERM, where this program sets the time and the file does not
END_S = 5  # after the requests: the KV snapshot, and the process's own end
# Settings that name a folder of an instance's files, and the platforms on which nothing is mounted for it.
FOLDERS = ("cache_dir", "kv_disk_dir")
SCRATCH = "/tmp"  # noqa: S108 - the container's own, and the one folder there that every user may write to
ONLY_SCRATCH = frozenset({"cloud-run", "lambda", "sagemaker", "fargate"})
KEEPS_FILES = frozenset({"ray"})  # a node's own files; elsewhere the folder goes with the instance
CACHE_GOES = (
    "keeps parts for the same instance only: its folder goes with it, and a new instance reads all of the store again. "
    "Leave it out, or patch in a volume of the node"
)
FILES_IN_MEMORY = frozenset({"cloud-run"})  # its file system is the instance's memory


class Limit(NamedTuple):
    """The range of one key on one platform, ends included; `what` names the platform's own setting."""

    key: str
    low: float
    high: float
    what: str
    source: str


class Gap(NamedTuple):
    """A key that a platform has no (W1) or only a similar (W2) setting for. `unless` is a value that needs none."""

    key: str
    code: Code
    message: str
    unless: object = None


_W1, _W2 = Code.W1, Code.W2
_KNATIVE_DOCS = "knative.dev/docs/serving"
_KNATIVE = (
    Limit("idle_timeout_s", 1, 3600, "scale-down-delay", f"{_KNATIVE_DOCS}/autoscaling/scale-bounds"),
    Limit(
        "request_timeout_s",
        1,
        600,
        "max-revision-timeout-seconds",
        f"{_KNATIVE_DOCS}/configuration/config-defaults",
    ),
    Limit(
        "max_concurrency",
        1,
        1000,
        "containerConcurrency",
        f"{_KNATIVE_DOCS}/autoscaling/concurrency",
    ),
)
_KUBERNETES = (
    Limit(
        "idle_timeout_s", 1, 3600, "stabilizationWindowSeconds", "kubernetes.io: HorizontalPodAutoscaler v2"
    ),
)

LIMITS: dict[str, tuple[Limit, ...]] = {
    "knative": _KNATIVE,
    "kserve": _KNATIVE,
    "kubernetes": _KUBERNETES,
    "helm": _KUBERNETES,
    "cloud-run": (
        Limit("request_timeout_s", 1, 3600, "timeoutSeconds", "cloud.google.com/run/quotas"),
        Limit("max_concurrency", 1, 1000, "containerConcurrency", "cloud.google.com/run/quotas"),
        Limit(
            "drain_s",
            1,
            8,
            "its 10 s after SIGTERM, less 2 s for the end",
            "cloud.google.com/run/docs/container-contract",
        ),
        Limit("instance.cpu", 1, 8, "cpu", "cloud.google.com/run/docs/configuring/services/cpu"),
        Limit("instance.memory", 512 << 20, 32 << 30, "memory", "cloud.google.com/run/quotas"),
        Limit("instance.gpu", 0, 1, "nvidia.com/gpu", "cloud.google.com/run/docs/configuring/services/gpu"),
    ),
    "lambda": (
        Limit("request_timeout_s", 1, 900, "Timeout", "docs.aws.amazon.com/lambda: quotas"),
        Limit(
            "drain_s",
            1,
            1.2,
            "its 2 s after SIGTERM, less 0.8 s for the end",
            "docs.aws.amazon.com/lambda: lambda-runtime-environment",
        ),
        Limit("instance.memory", 128 << 20, 10_240 << 20, "MemorySize", "docs.aws.amazon.com/lambda: quotas"),
        Limit("instance.gpu", 0, 0, "GPUs", "docs.aws.amazon.com/lambda"),
    ),
    "sagemaker": (
        Limit(
            "drain_s",
            1,
            30 - END_S,
            f"its 30 s after SIGTERM, less {END_S} s for the end",
            "docs.aws.amazon.com/sagemaker: your-algorithms-inference",
        ),
        Limit("request_timeout_s", 1, 480, "time of a stream", "docs.aws.amazon.com/sagemaker: invocations"),
    ),
    "fargate": (
        Limit(
            "drain_s",
            1,
            120 - END_S,
            f"stopTimeout, less {END_S} s for the end",
            "docs.aws.amazon.com/AmazonECS: task_definition_parameters",
        ),
        Limit("instance.gpu", 0, 0, "GPUs", "docs.aws.amazon.com/AmazonECS: fargate"),
        Limit("request_timeout_s", 1, 3600, "idle_timeout", "docs.aws.amazon.com: load-balancer attributes"),
    ),
    "ray": (),
    "kuberay": (),
}
# Versions that a platform divides one address's traffic among.
MAX_VERSIONS = {
    "knative": 16,
    "kserve": 2,
    "kubernetes": 16,
    "helm": 16,
    "cloud-run": 16,
    "lambda": 1,
    "sagemaker": 2,
    "fargate": 5,
    "ray": 16,
    "kuberay": 16,
}

_NO_BUFFER = Gap("buffer", _W1, "is left out: the platform keeps no spare instances", unless=0)
_NO_HYBRID = Gap(
    "policy", _W1, "is left out: the platform keeps idle instances for a fixed time", unless="fixed"
)
_NO_SHADOW = Gap("shadow", _W1, "is left out: the platform copies no requests")
_WAIT = Gap(
    "queue_timeout_s",
    _W2,
    "bounds the wait inside an instance; the platform bounds the wait for one by the request's own time",
)
_PRIORITY = Gap("priority", _W1, "is left out: it is for models that share one machine", unless=0)
_OF_RAY = (
    _NO_HYBRID,
    _PRIORITY,
    Gap(
        "queue_timeout_s",
        _W2,
        "is approximated by max_queued_requests: Ray bounds how many wait, not how long",
    ),
)
_REQUEST_RATE = (
    "is approximated by a rate: the platform counts requests a minute, not requests in work, and the rate assumes "
    "that each takes a second"
)

GAPS: dict[str, tuple[Gap, ...]] = {
    "knative": (_NO_BUFFER, _NO_HYBRID, _NO_SHADOW, _WAIT, _PRIORITY),
    "kserve": (_NO_BUFFER, _NO_HYBRID, _NO_SHADOW, _WAIT, _PRIORITY),
    "kubernetes": (_NO_HYBRID, _WAIT, _PRIORITY),
    "helm": (_NO_HYBRID, _WAIT, _PRIORITY),
    "cloud-run": (
        _NO_BUFFER,
        _NO_HYBRID,
        _NO_SHADOW,
        _WAIT,
        _PRIORITY,
        Gap("idle_timeout_s", _W1, "is left out: Cloud Run keeps idle instances for up to 15 minutes"),
    ),
    "lambda": (
        _NO_BUFFER,
        _NO_HYBRID,
        _NO_SHADOW,
        _PRIORITY,
        Gap("idle_timeout_s", _W1, "is left out: Lambda decides how long it keeps an idle instance"),
        Gap("queue_timeout_s", _W1, "is left out: Lambda does not hold requests, it refuses them with 429"),
        Gap(
            "target_concurrency",
            _W2,
            "is approximated by 1: an instance has one invocation at a time",
            unless=1,
        ),
        Gap(
            "max_concurrency", _W2, "is approximated by 1: an instance has one invocation at a time", unless=1
        ),
        Gap("ready_when", _W2, "holds for provisioned instances, which wait for exact weights in any case"),
    ),
    "sagemaker": (
        _NO_BUFFER,
        _NO_HYBRID,
        _PRIORITY,
        _WAIT,
        Gap("request_timeout_s", _W2, "bounds streams; an answer that is not a stream has 60 s"),
        Gap(
            "ready_when",
            _W1,
            "is left out: SageMaker asks /ping, which is 200 from the first layer on",
            unless="first-layer",
        ),
    ),
    "fargate": (
        _NO_BUFFER,
        _NO_HYBRID,
        _NO_SHADOW,
        _WAIT,
        _PRIORITY,
        Gap("target_concurrency", _W2, _REQUEST_RATE),
    ),
    "ray": _OF_RAY,
    "kuberay": _OF_RAY,
}


def check_limits(rendering: Rendering, model: Model) -> None:
    """Raises E6 for the first value beyond the platform's limits; warns of keys that it cannot do."""
    for limit in LIMITS[rendering.platform]:
        value = value_of(model, limit.key)
        if value is not None and not limit.low <= value <= limit.high:
            raise rendering.error(
                Code.E6,
                model,
                limit.key,
                f"is {_shown(limit.key, value)}, beyond {rendering.platform}'s limit for {limit.what}: "
                f"{_shown(limit.key, limit.low)} to {_shown(limit.key, limit.high)}",
                hint=f"Source: {limit.source}, read on {READ}.",
            )
    _check_folders(rendering, model)
    for gap in GAPS[rendering.platform]:
        value = getattr(model, gap.key)
        if value is not None and value != gap.unless:
            rendering.warn(gap.code, model, gap.key, gap.message)


def _check_folders(rendering: Rendering, model: Model) -> None:
    """Raises E6 for a folder that the container's user could not make; warns (W2) of a cache of parts that no later
    instance finds.
    """
    if model.serve.get("cache_dir") and rendering.platform not in KEEPS_FILES:
        rendering.warn(Code.W2, model, "serve.cache_dir", CACHE_GOES, always=True)
    if rendering.platform not in ONLY_SCRATCH:
        return
    for name in FOLDERS:
        folder = model.serve.get(name)
        if folder and not posixpath.normpath(str(folder)).startswith(f"{SCRATCH}/"):
            raise rendering.error(
                Code.E6,
                model,
                f"serve.{name}",
                f"is {folder}; on {rendering.platform} an instance keeps files below {SCRATCH} only",
                hint=f'Write {name} = "{SCRATCH}/teneral".',
            )


def value_of(model: Model, key: str) -> float | None:
    """A number of the model by its key in the file: `instance.memory` is in bytes."""
    if not key.startswith("instance."):
        value: float | None = getattr(model, key)
        return value
    name = key.removeprefix("instance.")
    size: float | None = getattr(model.instance, "memory_bytes" if name == "memory" else name)
    return size


def _shown(key: str, value: float) -> str:
    if key.endswith(".memory"):
        return _mib(value)
    return f"{value:,g} s" if key.endswith("_s") else f"{value:,g}"


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


def needed_bytes(model: Model, size: ModelSize) -> int:
    """The least memory of an instance: the weights, the KV pool, bytes in flight and the process."""
    kv_bytes = 0
    if size.has_kv:
        kv_bytes = int(model.serve.get("kv_bytes") or KV_BYTES) + int(model.serve.get("kv_host_bytes") or 0)
    staging = int(model.serve.get("staging_bytes") or STAGING_BYTES)
    weight_bytes = min(size.weight_bytes, int(model.serve.get("weights_bytes") or size.weight_bytes))
    return weight_bytes + kv_bytes + staging + PROCESS_BYTES


def _memory_bytes(rendering: Rendering, model: Model) -> int:
    given, size = model.instance.memory_bytes, rendering.sizes.get(model.name)
    files = disk_bytes(model) if rendering.platform in FILES_IN_MEMORY else 0
    if size is None:
        if given is None:
            raise _needed(
                rendering, model, "memory", 'memory = "4GiB", or --read-manifests to take it from the model'
            )
        if files and given < files + PROCESS_BYTES:
            raise _too_small(
                rendering, model, given, files + PROCESS_BYTES, f"the process and {_mib(files)} of files"
            )
        return given
    least = needed_bytes(model, size) + files
    if given is None:
        return -(-least // MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES
    if given < least:
        kept = f", {_mib(files)} of files" if files else ""
        kv = ", the KV pool" if size.has_kv else ""
        parts = f"the weights ({_mib(size.weight_bytes)}){kv}{kept} and the process"
        raise _too_small(rendering, model, given, least, parts)
    return given


def _too_small(rendering: Rendering, model: Model, given: int, least: int, parts: str) -> Exception:
    lower = {"of files": "cache_bytes, kv_disk_bytes", "KV pool": "kv_bytes"}
    keys = next((f", or lower {keys}" for part, keys in lower.items() if part in parts), "")
    return rendering.error(
        Code.E6,
        model,
        "instance.memory",
        f"is {_mib(given)}; {parts} of {model.name} need {_mib(least)}",
        hint=f"Give more{keys} in [models.{model.name}.serve]." if keys else "Give more.",
    )


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"


def _needed(rendering: Rendering, model: Model, key: str, example: str) -> Exception:
    return rendering.error(
        Code.E2,
        model,
        f"instance.{key}",
        "is needed to render",
        hint=f"Write it below [instance]: {example}.",
    )
