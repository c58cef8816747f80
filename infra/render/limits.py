"""Each platform's limits and gaps as data: what a value may be there, and which keys have no counterpart.

A limit has the place where it is documented and the day it was read. A value beyond it is refused (E6), because the
platform would refuse it later or, worse, do something else in silence. Limits that join several values (Fargate's
pairs of CPU and memory) are in the platform's own file.
"""

from __future__ import annotations

from typing import NamedTuple

from ...handlers.pool.values import Code, Model
from .documents import Rendering

READ = "2026-11-23"  # the day on which all of these pages were read


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
        Limit("drain_s", 1, 10, "time after SIGTERM", "cloud.google.com/run/docs/container-contract"),
        Limit("instance.cpu", 1, 8, "cpu", "cloud.google.com/run/docs/configuring/services/cpu"),
        Limit("instance.memory", 512 << 20, 32 << 30, "memory", "cloud.google.com/run/quotas"),
        Limit("instance.gpu", 0, 1, "nvidia.com/gpu", "cloud.google.com/run/docs/configuring/services/gpu"),
    ),
    "lambda": (
        Limit("request_timeout_s", 1, 900, "Timeout", "docs.aws.amazon.com/lambda: quotas"),
        Limit(
            "drain_s", 1, 2, "time after SIGTERM", "docs.aws.amazon.com/lambda: lambda-runtime-environment"
        ),
        Limit("instance.memory", 128 << 20, 10_240 << 20, "MemorySize", "docs.aws.amazon.com/lambda: quotas"),
        Limit("instance.gpu", 0, 0, "GPUs", "docs.aws.amazon.com/lambda"),
    ),
    "sagemaker": (
        Limit(
            "drain_s", 1, 30, "time after SIGTERM", "docs.aws.amazon.com/sagemaker: your-algorithms-inference"
        ),
        Limit("request_timeout_s", 1, 480, "time of a stream", "docs.aws.amazon.com/sagemaker: invocations"),
    ),
    "fargate": (
        Limit("drain_s", 1, 120, "stopTimeout", "docs.aws.amazon.com/AmazonECS: task_definition_parameters"),
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
    ),
    "fargate": (
        _NO_BUFFER,
        _NO_HYBRID,
        _NO_SHADOW,
        _WAIT,
        _PRIORITY,
        Gap("target_concurrency", _W2, _REQUEST_RATE),
    ),
    "ray": (
        _NO_HYBRID,
        Gap(
            "queue_timeout_s",
            _W2,
            "is approximated by max_queued_requests: Ray bounds how many wait, not how long",
        ),
    ),
    "kuberay": (
        _NO_HYBRID,
        Gap(
            "queue_timeout_s",
            _W2,
            "is approximated by max_queued_requests: Ray bounds how many wait, not how long",
        ),
    ),
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
    for gap in GAPS[rendering.platform]:
        value = getattr(model, gap.key)
        if value is not None and value != gap.unless:
            rendering.warn(gap.code, model, gap.key, gap.message)


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
        return f"{value / (1 << 20):,.0f} MiB"
    return f"{value:,g} s" if key.endswith("_s") else f"{value:,g}"
