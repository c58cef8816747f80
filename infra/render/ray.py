"""Ray Serve's configuration, and the same inside of KubeRay's RayService.

One application a version of a model, without an address, and one ingress in front of all. With `min_warm = 0` one
replica stays, and its server sleeps (`sleep: true`): waking it from a standby process takes a third of a second, a
replica of Ray's four seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import Document, Rendering
from .limits import Unit, check_limits, units_of
from .pods import (
    USER_ID,
    cpu_quantity,
    memory_quantity,
    security_context,
    whole_seconds,
)
from .yaml_text import yaml_text

PORT = 8000
HANDLERS = "teneral.handlers.contrib.ray"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
STANDBY_SOCKET = "/run/teneral/standby.sock"
END_S = 5
HEAD_CPU, HEAD_BYTES = 2, 4 << 30
RAY_VERSION = "2.60.0"


def render_serve(rendering: Rendering, models: Sequence[Model]) -> list[Document]:
    """`serve deploy serve.yaml`."""
    return [
        Document(
            "Serve",
            "teneral",
            _serve_config(rendering, models, standby=rendering.pool.node.standby > 0),
            "serve.yaml",
        )
    ]


def render_kuberay(rendering: Rendering, models: Sequence[Model]) -> list[Document]:
    """A RayService whose workers have one instance each."""
    units = [unit for model in models for unit in units_of(rendering, model, sets_drain=True)]
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "teneral", "labels": {"app.kubernetes.io/part-of": "teneral"}},
        "spec": {
            "serveConfigV2": yaml_text([_serve_config(rendering, models, standby=False)]),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "enableInTreeAutoscaling": True,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": {"spec": _pod(units[0], "ray-head", HEAD_CPU, HEAD_BYTES, 0)},
                },
                "workerGroupSpecs": [_workers(unit) for unit in units],
            },
        },
    }
    return [Document("RayService", "teneral", body, "rayservice.yaml")]


def _serve_config(rendering: Rendering, models: Sequence[Model], *, standby: bool) -> dict[str, Any]:
    applications, served = [], {}
    for model in models:
        check_limits(rendering, model)
        if model.shadow:
            rendering.warn(Code.W1, model, "shadow", "is left out: the ingress copies no requests")
        units = units_of(rendering, model, sets_drain=True)
        served[model.name] = {unit.name: unit.weight for unit in units}
        applications += [_application(unit, standby=standby) for unit in units]
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
                "ray_actor_options": {"num_cpus": 0.1},
            }
        ],
    }
    longest_s = max(model.request_timeout_s + model.queue_timeout_s for model in models)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT, "request_timeout_s": longest_s},  # noqa: S104 - a container's
        "applications": [*applications, ingress],
    }


def _application(unit: Unit, *, standby: bool) -> dict[str, Any]:
    model = unit.model
    environment = dict(unit.environment)
    if standby:
        environment["TENERAL_STANDBY_SOCKET"] = STANDBY_SOCKET
    settings = {
        "environment": environment,
        "secrets": dict(unit.secrets),
        "ready_path": model.ready_path,
        "drain_s": unit.drain_s,
        "idle_timeout_s": model.idle_timeout_s,
        "sleep": unit.min_warm == 0,
    }
    return {
        "name": unit.name,
        "route_prefix": None,
        "import_path": f"{HANDLERS}.app:app",
        "args": {"settings": settings},
        "deployments": [_deployment(unit)],
    }


def _deployment(unit: Unit) -> dict[str, Any]:
    """Each of Ray's delays is written out: its own defaults are 30 s up and 600 s down."""
    model, least = unit.model, max(1, unit.min_warm)
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
    if model.buffer:
        scaling["policy"] = {
            "policy_function": f"{HANDLERS}.policy:desired",
            "policy_kwargs": {"buffer": model.buffer},
        }
    options: dict[str, Any] = {"num_cpus": unit.cpu, "memory": unit.memory_bytes}
    if unit.gpu:
        options["num_gpus"] = unit.gpu
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


def _workers(unit: Unit) -> dict[str, Any]:
    """A group a version, so that a worker is as large as one instance."""
    return {
        "groupName": unit.name,
        "replicas": max(1, unit.min_warm),
        "minReplicas": max(1, unit.min_warm),
        "maxReplicas": max(1, unit.min_warm, unit.max_instances),
        "rayStartParams": {},
        "template": {"spec": _pod(unit, "ray-worker", unit.cpu, unit.memory_bytes, unit.gpu)},
    }


def _pod(unit: Unit, name: str, cpu: float, memory_bytes: int, gpu: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"cpu": cpu_quantity(cpu), "memory": memory_quantity(memory_bytes)}
    if gpu:
        sizes["nvidia.com/gpu"] = str(gpu)
    # Ray writes below /tmp/ray, and its workers' home.
    security = {key: value for key, value in security_context().items() if key != "readOnlyRootFilesystem"}
    secrets = sorted(set(unit.secrets.values()))
    container: dict[str, Any] = {
        "name": name,
        "image": unit.image,
        "resources": {"requests": sizes, "limits": dict(sizes)},
        "securityContext": security,
    }
    if secrets and name == "ray-worker":
        container["env"] = [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{unit.base}-secrets", "key": key}}}
            for key in secrets
        ]
    return {
        "automountServiceAccountToken": name == "ray-head",  # its autoscaler asks the API server for pods
        "terminationGracePeriodSeconds": whole_seconds(unit.drain_s) + END_S,
        "securityContext": {"fsGroup": USER_ID},
        "containers": [container],
    }
