"""Values of the Helm chart `infra/helm/teneral`, and the schema that the chart checks them by.

The chart makes the documents that `kubernetes.py` makes, from the pool's own keys: `helm upgrade --set
models.chat.min_warm=2` does what the key in the file would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...handlers.pool.values import Model
from .documents import SCRATCH_BYTES, Document, Rendering
from .kubernetes import check
from .limits import LIMITS, MAX_VERSIONS
from .pods import cpu_quantity, memory_quantity, volume_sizes
from .units import Unit, units_of

NAME_PATTERN = "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def render_pool(rendering: Rendering, models: Sequence[Model]) -> list[Document]:
    """One document: the chart's values."""
    tables = {}
    for model in models:
        check(rendering, model)
        units = units_of(rendering, model, sets_drain=True)
        tables[units[0].base] = _model_values(units)
    body = {
        "prometheus": rendering.options.prometheus,
        "gateway": rendering.options.gateway,
        "models": tables,
    }
    return [Document("Values", "teneral", body, "values.yaml")]


def _model_values(units: list[Unit]) -> dict[str, Any]:
    unit, model = units[0], units[0].model
    environment = {name: value for name, value in unit.environment.items() if name != "TENERAL_MODEL"}
    values: dict[str, Any] = {
        "name": model.name,
        "image": unit.image,
        "cpu": cpu_quantity(unit.cpu),
        "memory": memory_quantity(unit.memory_bytes),
        "disk": memory_quantity(unit.disk_bytes + SCRATCH_BYTES) if unit.disk_bytes else "",
        "gpu": unit.gpu,
        "min_warm": model.min_warm,
        "max_instances": model.max_instances,
        "buffer": model.buffer,
        "idle_timeout_s": model.idle_timeout_s,
        "target_concurrency": model.target_concurrency,
        "queue_timeout_s": model.queue_timeout_s,
        "request_timeout_s": model.request_timeout_s,
        "drain_s": unit.drain_s,
        "ready_path": model.ready_path,
        "volumes": [
            {"name": name, "path": path, "size": memory_quantity(size_bytes)}
            for path, (name, size_bytes) in volume_sizes(model).items()
        ],
        "environment": environment,
        "secrets": dict(unit.secrets),
        "versions": [_version_values(each) for each in units],
    }
    if model.shadow and model.is_versioned:
        values["shadow"] = {"version": model.shadow.version, "percent": model.shadow.percent}
    return values


def _version_values(unit: Unit) -> dict[str, Any]:
    values: dict[str, Any] = {"source": unit.address, "weight": unit.weight}
    return values if unit.version is None else {"version": unit.version, **values}


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
