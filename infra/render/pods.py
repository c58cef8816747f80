"""The parts of a pod that all of Kubernetes' platforms share: container, probes, resources, security, volumes."""

from __future__ import annotations

import math
from typing import Any

from ...handlers.pool.values import Model
from .documents import SCRATCH_BYTES
from .limits import MIB, Unit

PORT = 8080
USER_ID = 10001  # of the image
# Longest wait for the first layers before a container is taken for broken. The port is open within a second, so the
# startup probe only asks whether the process lives; a load may take as long as it needs.
START_S = 30


def labels(unit: Unit) -> dict[str, str]:
    return {"app.kubernetes.io/name": unit.name, "app.kubernetes.io/part-of": "teneral"}


def metadata(unit: Unit, **more: Any) -> dict[str, Any]:
    return {"name": unit.name, "labels": labels(unit), **more}


def service_account(unit: Unit) -> dict[str, Any]:
    """An account without rights in the cluster. A cloud's identity is bound to it by an annotation or by its name."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": unit.base, "labels": {"app.kubernetes.io/part-of": "teneral"}},
        "automountServiceAccountToken": False,
    }


def container(unit: Unit, *, port_name: str = "http", name: str = "teneral") -> dict[str, Any]:
    """The one container, without probes."""
    return {
        "name": name,
        "image": unit.image,
        "args": ["serve"],
        "env": environment(unit),
        "envFrom": store_variables(unit),
        "ports": [{"name": port_name, "containerPort": PORT}],
        "resources": resources(unit),
        "securityContext": security_context(),
        "volumeMounts": volume_mounts(unit),
    }


def environment(unit: Unit) -> list[dict[str, Any]]:
    """Settings as values, secrets as references to keys of the secret `<model>-secrets`."""
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in unit.environment.items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{unit.base}-secrets", "key": key}}}
        for name, key in unit.secrets.items()
    ]


def store_variables(unit: Unit) -> list[dict[str, Any]]:
    """Variables of the secret `<model>-store`, where it exists: keys of a store that takes no identity of a pod."""
    return [{"secretRef": {"name": f"{unit.base}-store", "optional": True}}]


def resources(unit: Unit) -> dict[str, Any]:
    """Requests equal limits: a load uses all the memory that it says, and threads are counted by the limit on cores."""
    sizes = sizes_of(unit, unit.memory_bytes)
    return {"requests": sizes, "limits": dict(sizes)}


def sizes_of(unit: Unit, memory_bytes: int) -> dict[str, str]:
    """A container's cores, memory, disk and GPUs as quantities."""
    sizes = {"cpu": cpu_quantity(unit.cpu), "memory": memory_quantity(memory_bytes)}
    if unit.disk_bytes:
        sizes["ephemeral-storage"] = memory_quantity(unit.disk_bytes + SCRATCH_BYTES)
    if unit.gpu:
        sizes["nvidia.com/gpu"] = str(unit.gpu)
    return sizes


def security_context() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def volume_mounts(unit: Unit) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": path} for path, (name, _) in volume_sizes(unit.model).items()]


def volumes(unit: Unit) -> list[dict[str, Any]]:
    return [_empty_dir(name, size_bytes) for name, size_bytes in volume_sizes(unit.model).values()]


def volume_sizes(model: Model) -> dict[str, tuple[str, int]]:
    """Name and bytes of each volume by the path at which it is mounted; no two share a path."""
    found = {"/tmp": ("scratch", SCRATCH_BYTES)}  # noqa: S108 - in the container, which has its own
    settings = model.serve_settings()
    for name, folder, size_bytes in (
        ("part-cache", settings.get("cache_dir"), int(settings.get("cache_bytes", 20 << 30))),
        ("kv", settings.get("kv_disk_dir"), int(settings.get("kv_disk_bytes") or 0)),
    ):
        if folder and folder not in found:
            found[folder] = (name, max(size_bytes, SCRATCH_BYTES))
    return found


def _empty_dir(name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"sizeLimit": memory_quantity(size_bytes)}}


def probes(unit: Unit) -> dict[str, Any]:
    """Life and death ask /livez, which is 200 while the server lives; requests go where the ready path is 200."""
    return {
        "startupProbe": {**_get("/livez"), "periodSeconds": 1, "failureThreshold": START_S},
        "readinessProbe": {**_get(unit.model.ready_path), "periodSeconds": 1, "failureThreshold": 1},
        "livenessProbe": {**_get("/livez"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
    }


def _get(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT}}


def cpu_quantity(cores: float) -> str:
    return str(int(cores)) if cores == int(cores) else f"{math.ceil(cores * 1000)}m"


def memory_quantity(size_bytes: int) -> str:
    for unit_bytes, suffix in ((1 << 30, "Gi"), (MIB, "Mi")):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{suffix}"
    return str(size_bytes)


def whole_seconds(seconds: float) -> int:
    """Rounded up: most platforms take whole seconds, and a shorter time would cut something off."""
    return max(1, math.ceil(seconds))
