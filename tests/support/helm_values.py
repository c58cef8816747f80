"""The schema of the values of the Helm chart, from the limits of what renders them."""

from __future__ import annotations

from typing import Any

from teneral.infra.render.limits import LIMITS, MAX_VERSIONS

# Of a pod's spec, what the chart's values may add: the cluster's matters, not the model's.
POD_KEYS = {
    "affinity": {"type": "object"},
    "imagePullSecrets": {"type": "array"},
    "nodeSelector": {"type": "object"},
    "priorityClassName": {"type": "string"},
    "runtimeClassName": {"type": "string"},
    "tolerations": {"type": "array"},
}
NAME_PATTERN = "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def values_schema() -> dict[str, Any]:
    """JSON Schema (draft 7, as Helm takes it) of the values."""
    limits = {limit.key: limit for limit in LIMITS["helm"]}
    idle = limits["idle_timeout_s"]
    text, quantity = (
        {"type": "string", "minLength": 1},
        {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"},
    )
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    version = _object(
        {"source": text, "version": _whole(1, 10**12), "weight": _whole(0, 100)}, required=["source"]
    )
    volume = _object(
        {
            "name": {"type": "string", "pattern": NAME_PATTERN},
            "path": {"type": "string", "pattern": "^/"},
            "size": quantity,
        },
        required=["name", "path", "size"],
    )
    model = _object(
        {
            "name": text,
            "image": text,
            "cpu": quantity,
            "memory": quantity,
            "disk": {"type": "string", "pattern": "^([0-9]+(Ki|Mi|Gi|Ti)?)?$"},
            "gpu": _whole(0, 16),
            "min_warm": _whole(0, 1000),
            "max_instances": _whole(1, 1000),
            "buffer": _whole(0, 100),
            "idle_timeout_s": _seconds(idle.low, idle.high),
            "target_concurrency": _whole(1, 1024),
            "queue_timeout_s": _seconds(0.1, 600),
            "request_timeout_s": _seconds(1, 3600),
            "drain_s": _seconds(1, 3600),
            "ready_path": {"enum": ["/readyz", "/readyz?when=exact"]},
            "volumes": {"type": "array", "items": volume},
            "environment": {**texts, "propertyNames": {"pattern": "^TENERAL_[A-Z0-9_]+$"}},
            "secrets": {**texts, "propertyNames": {"pattern": "^TENERAL_[A-Z0-9_]+$"}},
            "pod": _object(POD_KEYS, required=[]),
            "versions": {"type": "array", "items": version, "minItems": 1, "maxItems": MAX_VERSIONS["helm"]},
            "shadow": _object(
                {"version": _whole(1, 10**12), "percent": _whole(1, 100)}, required=["version", "percent"]
            ),
        },
        required=["image", "cpu", "memory", "versions"],
    )
    models = {"type": "object", "propertyNames": {"pattern": NAME_PATTERN}, "additionalProperties": model}
    schema = _object(
        {"prometheus": text, "gateway": text, "global": {"type": "object"}, "models": models},
        required=["models"],
    )
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart teneral",
        **schema,
    }


def _object(properties: dict[str, Any], *, required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _seconds(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}
