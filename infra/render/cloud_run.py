"""Cloud Run: a Service a model, as `gcloud run services replace` takes it.

Several versions are documents of one Service, replaced one after the other: each makes its revision, and the last one
divides the traffic among all.
"""

from __future__ import annotations

from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import RenderedDocument, Rendering, with_digest
from .limits import MIB, READ, Unit, check_limits, units_of
from .pods import PORT, cpu_quantity, memory_quantity, whole_seconds

GIB = 1 << 30
CORES = (1, 2, 4, 6, 8)
# Cores → least and most memory; cloud.google.com/run/docs/configuring/services/{cpu,memory-limits}.
MEMORY_OF_CORES = {
    1: (512 * MIB, 4 * GIB),
    2: (512 * MIB, 8 * GIB),
    4: (2 * GIB, 16 * GIB),
    6: (4 * GIB, 24 * GIB),
    8: (4 * GIB, 32 * GIB),
}
GPU_CORES, GPU_BYTES = 4, 16 * GIB  # least that an instance with a GPU has
MAX_START_S = 240
# Of a service account's name; cloud.google.com/iam/docs/service-accounts-create.
MIN_ACCOUNT_CHARS, MAX_ACCOUNT_CHARS = 6, 30
TARGET_SHARE = (0.1, 0.95)  # of containerConcurrency that instances may aim at


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    units = units_of(rendering, model)
    _check_size(rendering, units[0])
    if not rendering.options.project:
        rendering.warn(
            Code.W1,
            model,
            "source",
            "gets no identity of its own: without --project the service runs as the project's default account",
            always=True,
        )
    elif (account := account_name(units[0].base)) != units[0].base:
        rendering.warn(
            Code.W2,
            model,
            "source",
            f"runs as the account {account!r}: such names have {MIN_ACCOUNT_CHARS} to {MAX_ACCOUNT_CHARS} characters",
            always=True,
        )
    if len(units) == 1:
        return [
            _service(
                rendering,
                units[0],
                [{"latestRevision": True, "percent": 100}],
                f"{units[0].base}.service.yaml",
            )
        ]
    return [
        _service(
            rendering, unit, _traffic(units[:number]), f"{unit.base}.{number}-service-v{unit.version}.yaml"
        )
        for number, unit in enumerate(units, 1)
    ]


def account_name(base: str) -> str:
    """The name of a service's account: the service's own where that may be one, else one with a digest, so that two
    services never share an identity.
    """
    if MIN_ACCOUNT_CHARS <= len(base) <= MAX_ACCOUNT_CHARS:
        return base
    return with_digest(base, base, MAX_ACCOUNT_CHARS)


def secret_name(key: str) -> str:
    """The name in Secret Manager of a secret setting's variable."""
    return key.lower().replace("_", "-")


def _check_size(rendering: Rendering, unit: Unit) -> None:
    if unit.cpu not in CORES:
        allowed = ", ".join(map(str, CORES))
        raise rendering.error(
            Code.E6, unit.model, "instance.cpu", f"is {unit.cpu:g}; Cloud Run has instances of {allowed} cores",
            hint=f"Source: cloud.google.com/run/docs/configuring/services/cpu, read on {READ}.",
        )  # fmt: skip
    least, most = MEMORY_OF_CORES[int(unit.cpu)]
    if unit.gpu:
        least = max(least, GPU_BYTES)
        if unit.cpu < GPU_CORES:
            raise rendering.error(
                Code.E6,
                unit.model,
                "instance.cpu",
                f"is {unit.cpu:g}; Cloud Run's GPUs need {GPU_CORES} cores",
            )
    if not least <= unit.memory_bytes <= most:
        raise rendering.error(
            Code.E6,
            unit.model,
            "instance.memory",
            f"is {unit.memory_bytes / MIB:,.0f} MiB; with {unit.cpu:g} cores Cloud Run takes "
            f"{least / MIB:,.0f} to {most / MIB:,.0f} MiB",
        )
    if unit.disk_bytes:
        rendering.warn(
            Code.W2,
            unit.model,
            "serve",
            f"keeps up to {unit.disk_bytes / MIB:,.0f} MiB of files, which are in the instance's memory on Cloud Run",
            always=True,
        )


def _traffic(units: list[Unit]) -> list[dict[str, Any]]:
    """Of the versions so far; their weights fill up to 100 with the first one's until the last one is there."""
    total = sum(unit.weight for unit in units)
    weights = [unit.weight for unit in units]
    weights[0] += 100 - total
    return [
        {"revisionName": unit.name, "percent": weight, "tag": f"v{unit.version}"}
        for unit, weight in zip(units, weights, strict=True)
    ]


def _service(rendering: Rendering, unit: Unit, traffic: list[dict[str, Any]], file: str) -> RenderedDocument:
    body = {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": unit.base,
            "labels": {"app": "teneral"},
            "annotations": {"run.googleapis.com/ingress": "all"},
        },
        "spec": {"template": _template(rendering, unit), "traffic": traffic},
    }
    return RenderedDocument("Service", unit.base, body, file)


def _template(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    model = unit.model
    spec: dict[str, Any] = {
        "containerConcurrency": model.max_concurrency,
        "timeoutSeconds": whole_seconds(model.request_timeout_s),
        "containers": [_container(unit)],
    }
    if rendering.options.project:
        account = account_name(unit.base)
        spec["serviceAccountName"] = f"{account}@{rendering.options.project}.iam.gserviceaccount.com"
    if unit.gpu:
        spec["nodeSelector"] = {"run.googleapis.com/accelerator": "nvidia-l4"}
    metadata: dict[str, Any] = {"annotations": _annotations(unit)}
    if unit.version is not None and unit.name != unit.base:
        metadata = {"name": unit.name, **metadata}
    return {"metadata": metadata, "spec": spec}


def _annotations(unit: Unit) -> dict[str, str]:
    model = unit.model
    low, high = TARGET_SHARE
    share = min(high, max(low, model.target_concurrency / model.max_concurrency))
    found = {
        "autoscaling.knative.dev/minScale": str(unit.min_warm),
        "autoscaling.knative.dev/maxScale": str(unit.max_instances),
        "run.googleapis.com/scaling-concurrency-target": f"{share:.2f}",
        "run.googleapis.com/execution-environment": "gen2",
        "run.googleapis.com/startup-cpu-boost": "true",
        # A load goes on after the first layers are there, and needs its cores without a request, too.
        "run.googleapis.com/cpu-throttling": "false",
    }
    if unit.gpu:
        found["run.googleapis.com/gpu-zonal-redundancy-disabled"] = "true"
    return found


def _container(unit: Unit) -> dict[str, Any]:
    sizes = {"cpu": cpu_quantity(unit.cpu), "memory": memory_quantity(unit.memory_bytes)}
    if unit.gpu:
        sizes["nvidia.com/gpu"] = str(unit.gpu)
    secrets: list[dict[str, Any]] = [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secret_name(key), "key": "latest"}},
        }
        for name, key in unit.secrets.items()
    ]
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in unit.environment.items()]
    return {
        "image": unit.image,
        "args": ["serve"],
        "env": plain + secrets,
        "ports": [{"name": "http1", "containerPort": PORT}],
        "resources": {"limits": sizes},
        "startupProbe": {
            "httpGet": {"path": unit.model.ready_path, "port": PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": MAX_START_S,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": PORT},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
