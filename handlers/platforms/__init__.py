"""Where an instance runs: what the platforms that start containers want, where they do not want the same.

A server speaks every platform's HTTP contract at once (`http/app.py` has the routes); what is here is the little in
which one container must behave differently from another. A platform is recognised by a variable that it sets, or
named by `--platform`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from ...loader.errors import UsageError

AUTO = "auto"


class Platform(enum.StrEnum):
    HTTP = (
        "http"  # any that starts a container and sends it requests: ECS, Kubernetes, a person's own machine
    )
    CLOUD_RUN = "cloud-run"  # and Knative
    KSERVE = "kserve"
    SAGEMAKER = "sagemaker"
    RUNPOD = "runpod"  # its load balancer
    RUNPOD_QUEUE = "runpod-queue"
    LAMBDA = "lambda"


class Traits(NamedTuple):
    """`drain_timeout_s` is what stays below the time between the platform's SIGTERM and its SIGKILL."""

    drain_timeout_s: float = 8.0
    ping_while_loading: int = 503  # the status of /ping until requests can be answered


# Sources: Cloud Run container contract (SIGTERM, 10 s); SageMaker "custom inference code with hosting services" (30 s);
# Kubernetes' terminationGracePeriodSeconds (30 s); RunPod "load balancing endpoints" (204: initialising); Lambda
# "runtime environment lifecycle" (2 s with extensions).
TRAITS: dict[Platform, Traits] = {
    Platform.HTTP: Traits(),
    Platform.CLOUD_RUN: Traits(),
    Platform.KSERVE: Traits(drain_timeout_s=25.0),
    Platform.SAGEMAKER: Traits(drain_timeout_s=25.0),
    Platform.RUNPOD: Traits(ping_while_loading=204),
    Platform.RUNPOD_QUEUE: Traits(),
    Platform.LAMBDA: Traits(drain_timeout_s=1.2),
}

# Variables that only the platform sets. SageMaker and KServe set none; neither needs another behaviour while loading.
SIGNS: tuple[tuple[str, Platform], ...] = (
    ("AWS_LAMBDA_RUNTIME_API", Platform.LAMBDA),
    ("RUNPOD_WEBHOOK_GET_JOB", Platform.RUNPOD_QUEUE),
    ("RUNPOD_ENDPOINT_ID", Platform.RUNPOD),
    ("K_SERVICE", Platform.CLOUD_RUN),
)


def platform_of(setting: str, environment: Mapping[str, str]) -> Platform:
    """The platform that was named, or with 'auto' the one whose variable is there. Raises `UsageError`."""
    if setting == AUTO:
        return next((platform for variable, platform in SIGNS if environment.get(variable)), Platform.HTTP)
    try:
        return Platform(setting)
    except ValueError:
        raise UsageError(
            f"{setting!r} is no platform", key="platform", hint=f"Name one of {', '.join((AUTO, *Platform))}."
        ) from None
