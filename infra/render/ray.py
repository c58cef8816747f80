"""Ray Serve's configuration, and the same inside of KubeRay's RayService.

One application a version of a model, without an address, and one ingress in front of all. With `min_warm = 0` one
replica stays, and its server sleeps (`sleep: true`): waking it from a standby process takes a third of a second, a
replica of Ray's four seconds. With `--ray-zero` no replica stays.

KubeRay's operator writes a container's command line, from a group's `rayStartParams` and behind the container's own
`command`, and probes that call wget, which the image does not have: they are rendered here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import RenderedDocument, Rendering
from .limits import END_S, SCRATCH, Unit, check_limits, units_of
from .pods import (
    USER_ID,
    cpu_quantity,
    memory_quantity,
    security_context,
    sizes_of,
    store_variables,
    volume_mounts,
    volumes,
    whole_seconds,
)
from .yaml_text import yaml_text

PORT = 8000
HANDLERS = "teneral.handlers.contrib.ray"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
STANDBY_SOCKET = "/run/teneral/standby.sock"
POD_STANDBY_SOCKET = "/tmp/teneral-standby.sock"  # noqa: S108 - a pod's own
HEAD_CPU, HEAD_BYTES = 2, 4 << 30
INGRESS_BYTES = 256 << 20
RAY_BYTES = 1 << 30  # of a worker's memory, for Ray's own processes and its object store
AGENT_PORT = 52365
RAY_VERSION = "2.60.0"


def render_serve(rendering: Rendering, models: Sequence[Model]) -> list[RenderedDocument]:
    """`serve deploy serve.yaml`."""
    return [
        RenderedDocument(
            "Serve",
            "teneral",
            _serve_config(rendering, models),
            "serve.yaml",
        )
    ]


def render_kuberay(rendering: Rendering, models: Sequence[Model]) -> list[RenderedDocument]:
    """A RayService whose workers have one instance each: a resource by the version's name takes it there."""
    units = [unit for model in models for unit in units_of(rendering, model, sets_drain=True)]
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "teneral", "labels": {"app.kubernetes.io/part-of": "teneral"}},
        "spec": {
            "serveConfigV2": yaml_text([_serve_config(rendering, models, in_pods=True)]),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "enableInTreeAutoscaling": True,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": {"spec": _head_pod(units[0])},
                },
                "workerGroupSpecs": [_workers(rendering, unit) for unit in units],
            },
        },
    }
    return [RenderedDocument("RayService", "teneral", body, "rayservice.yaml")]


def _serve_config(rendering: Rendering, models: Sequence[Model], *, in_pods: bool = False) -> dict[str, Any]:
    applications: list[dict[str, Any]] = []
    served: dict[str, dict[str, int]] = {}
    for model in models:
        check_limits(rendering, model)
        if model.shadow:
            rendering.warn(Code.W1, model, "shadow", "is left out: the ingress copies no requests")
        units = units_of(rendering, model, sets_drain=True)
        served[model.name] = {unit.name: unit.weight for unit in units}
        if model.min_warm == 0 and rendering.options.ray_zero:
            rendering.warn(
                Code.W2,
                model,
                "min_warm",
                "is 0 replicas with --ray-zero: the first request starts one, which takes Ray 4 to 5 s",
                always=True,
            )
        applications += [_application(rendering, unit, in_pods=in_pods) for unit in units]
    ingress = {
        "name": "ingress",
        "route_prefix": "/",
        "import_path": f"{HANDLERS}.app:ingress",
        "args": {"models": served},
        "deployments": [
            {
                "name": "Ingress",
                "num_replicas": 2,
                "max_ongoing_requests": 1000,
                # A node whose cores are all taken by instances has room for it, too; Ray spreads by the memory.
                "ray_actor_options": {"num_cpus": 0, "memory": INGRESS_BYTES},
            }
        ],
    }
    longest_s = max(model.request_timeout_s + model.queue_timeout_s for model in models)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT, "request_timeout_s": longest_s},  # noqa: S104 - a container's
        "applications": [*applications, ingress],
    }


def _application(rendering: Rendering, unit: Unit, *, in_pods: bool) -> dict[str, Any]:
    model = unit.model
    environment = dict(unit.environment)
    if in_pods and _has_standby(rendering, unit):
        environment["TENERAL_STANDBY_SOCKET"] = POD_STANDBY_SOCKET
    elif not in_pods and rendering.pool.node.standby:
        environment["TENERAL_STANDBY_SOCKET"] = STANDBY_SOCKET
    settings = {
        "environment": environment,
        "secrets": dict(unit.secrets),
        "ready_path": model.ready_path,
        "drain_s": unit.drain_s,
        "idle_timeout_s": model.idle_timeout_s,
        "sleep": _sleeps(rendering, unit),
    }
    return {
        "name": unit.name,
        "route_prefix": None,
        "import_path": f"{HANDLERS}.app:app",
        "args": {"settings": settings},
        "deployments": [_deployment(rendering, unit, in_pods=in_pods)],
    }


def _sleeps(rendering: Rendering, unit: Unit) -> bool:
    return unit.min_warm == 0 and not rendering.options.ray_zero


def _least(rendering: Rendering, unit: Unit) -> int:
    """Replicas that stay."""
    return unit.min_warm if rendering.options.ray_zero else max(1, unit.min_warm)


def _has_standby(rendering: Rendering, unit: Unit) -> bool:
    """A pod has one instance: a standby process is of use only where it sleeps."""
    return rendering.pool.node.standby > 0 and _sleeps(rendering, unit)


def _deployment(rendering: Rendering, unit: Unit, *, in_pods: bool) -> dict[str, Any]:
    """Each of Ray's delays is written out: its own defaults are 30 s up and 600 s down."""
    model, least = unit.model, _least(rendering, unit)
    scaling: dict[str, Any] = {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": max(unit.max_instances, least),
        "target_ongoing_requests": model.target_concurrency,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": model.idle_timeout_s,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
    }
    if least == 0:
        scaling["downscale_to_zero_delay_s"] = model.idle_timeout_s
    if model.buffer:
        scaling["policy"] = {
            "policy_function": f"{HANDLERS}.policy:desired",
            "policy_kwargs": {"buffer": model.buffer},
        }
    options: dict[str, Any] = {"num_cpus": unit.cpu, "memory": unit.memory_bytes}
    if unit.gpu:
        options["num_gpus"] = unit.gpu
    if in_pods:
        options["resources"] = {unit.name: 1}
    return {
        "name": "Replica",
        "max_ongoing_requests": model.max_concurrency,
        "max_queued_requests": model.max_concurrency * unit.max_instances,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": unit.drain_s + END_S,
        "health_check_period_s": 10.0,
        "health_check_timeout_s": 30.0,
        "autoscaling_config": scaling,
        "ray_actor_options": options,
        "request_router_config": {"request_router_class": ROUTER},
    }


def _workers(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    """A group a version, so that a worker is as large as one instance, and Ray's own processes."""
    least = _least(rendering, unit)
    # The operator puts the value on a shell's command line as it is.
    resource = json.dumps(json.dumps({unit.name: 1}))
    return {
        "groupName": unit.name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": max(1, least, unit.max_instances),
        "rayStartParams": {"resources": resource},
        "template": {"spec": _worker_pod(rendering, unit)},
    }


def _head_pod(unit: Unit) -> dict[str, Any]:
    probes = {"readinessProbe": _probe(8265, "/api/gcs_healthz"), "livenessProbe": _liveness()}
    container = {
        **_container(
            unit, "ray-head", {"cpu": cpu_quantity(HEAD_CPU), "memory": memory_quantity(HEAD_BYTES)}
        ),
        **probes,
    }
    return _pod(unit, container, calls_the_api=True)  # its autoscaler asks for pods


def _worker_pod(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    """Traffic goes where Ray's proxy answers, as it does once the node has a replica."""
    memory_bytes = unit.memory_bytes + RAY_BYTES
    container: dict[str, Any] = {}
    if _has_standby(rendering, unit):
        standby_bytes = rendering.pool.node.standby_memory_bytes
        memory_bytes += standby_bytes
        if rendering.pool.node.standby_base is not None:
            warning = rendering.pool.warning(
                Code.W1, "is left out: a pod has one model's instance", "node", "standby_base"
            )
            if warning not in rendering.warnings:
                rendering.warnings.append(warning)
        # `ray start` follows behind `&&`.
        ahead = f" --memory {standby_bytes}" if standby_bytes else ""
        container["command"] = [f"teneral standby {POD_STANDBY_SOCKET} --processes 1{ahead} & true"]
    sizes = sizes_of(unit, memory_bytes)
    container = {**_container(unit, "ray-worker", sizes), **container}
    if secrets := sorted(set(unit.secrets.values())):
        container["env"] = [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{unit.base}-secrets", "key": key}}}
            for key in secrets
        ]
    container["envFrom"] = store_variables(unit)
    container["readinessProbe"] = _probe(PORT, "/-/healthz")
    container["livenessProbe"] = _liveness()
    # Not of /tmp: Ray keeps its logs there, and objects that are too many for its memory.
    mounts = [each for each in volume_mounts(unit) if each["mountPath"] != SCRATCH]
    names = {each["name"] for each in mounts}
    container["volumeMounts"] = mounts
    pod = _pod(unit, container, calls_the_api=False)
    return {**pod, "volumes": [each for each in volumes(unit) if each["name"] in names]}


def _container(unit: Unit, name: str, sizes: dict[str, str]) -> dict[str, Any]:
    # Ray writes below /tmp/ray, and its workers' home.
    security = {key: value for key, value in security_context().items() if key != "readOnlyRootFilesystem"}
    return {
        "name": name,
        "image": unit.image,
        "resources": {"requests": sizes, "limits": dict(sizes)},
        "securityContext": security,
    }


def _pod(unit: Unit, container: dict[str, Any], *, calls_the_api: bool) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": calls_the_api,
        "terminationGracePeriodSeconds": whole_seconds(unit.drain_s) + END_S,
        "securityContext": {"fsGroup": USER_ID},
        "containers": [container],
    }


def _probe(port: int, path: str) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "initialDelaySeconds": 10,
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 10,
    }


def _liveness() -> dict[str, Any]:
    return {**_probe(AGENT_PORT, "/api/local_raylet_healthz"), "failureThreshold": 120}
