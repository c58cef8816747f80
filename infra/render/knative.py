"""Knative: a Service a model; for several versions a Configuration each and a Route that divides the traffic."""

from __future__ import annotations

from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import RenderedDocument, Rendering
from .limits import Unit, check_limits, units_of
from .pods import container, labels, probes, service_account, volumes, whole_seconds

API = "serving.knative.dev/v1"


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    check_drain(rendering, model)
    units = units_of(rendering, model)
    account = service_account(units[0])
    documents = [
        RenderedDocument("ServiceAccount", units[0].base, account, f"{units[0].base}.service-account.yaml")
    ]
    if len(units) == 1:
        return [*documents, _service(units[0])]
    return [*documents, *map(_configuration, units), _route(units)]


def check_drain(rendering: Rendering, model: Model) -> None:
    """Knative's grace period is the revision's request time, and cannot be set."""
    if model.drain_s is not None and model.drain_s > model.request_timeout_s:
        raise rendering.error(
            Code.E6,
            model,
            "drain_s",
            f"is {model.drain_s:g} s, longer than request_timeout_s ({model.request_timeout_s:g} s), "
            "which is Knative's time between SIGTERM and the end",
        )


def _service(unit: Unit) -> RenderedDocument:
    body = {
        "apiVersion": API,
        "kind": "Service",
        "metadata": {"name": unit.name, "labels": labels(unit)},
        "spec": {"template": _template(unit), "traffic": [{"latestRevision": True, "percent": 100}]},
    }
    return RenderedDocument("Service", unit.name, body, f"{unit.name}.service.yaml")


def _configuration(unit: Unit) -> RenderedDocument:
    body = {
        "apiVersion": API,
        "kind": "Configuration",
        "metadata": {"name": unit.name, "labels": labels(unit)},
        "spec": {"template": _template(unit)},
    }
    return RenderedDocument("Configuration", unit.name, body, f"{unit.name}.configuration.yaml")


def _route(units: list[Unit]) -> RenderedDocument:
    """Each version has an address of its own as well: its tag is in front of the route's host."""
    name = units[0].base
    body = {
        "apiVersion": API,
        "kind": "Route",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "teneral"}},
        "spec": {
            "traffic": [
                {
                    "configurationName": unit.name,
                    "latestRevision": True,
                    "percent": unit.weight,
                    "tag": f"v{unit.version}",
                }
                for unit in units
            ]
        },
    }
    return RenderedDocument("Route", name, body, f"{name}.route.yaml")


def _template(unit: Unit) -> dict[str, Any]:
    model = unit.model
    # Knative asks the readiness probe while a container starts, too; it has no place for a startup probe that differs.
    tests = probes(unit)
    tests.pop("startupProbe")
    return {
        "metadata": {"labels": labels(unit), "annotations": scaling_annotations(unit)},
        "spec": {
            "serviceAccountName": unit.base,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containerConcurrency": model.max_concurrency,
            "timeoutSeconds": whole_seconds(model.request_timeout_s),
            "containers": [{**container(unit, port_name="http1"), **tests}],
            "volumes": volumes(unit),
        },
    }


def scaling_annotations(unit: Unit) -> dict[str, str]:
    """The autoscaler's settings; each is written out, since every platform has other defaults."""
    model, idle_s = unit.model, whole_seconds(unit.model.idle_timeout_s)
    prefix = "autoscaling.knative.dev"
    return {
        f"{prefix}/class": "kpa.autoscaling.knative.dev",
        f"{prefix}/metric": "concurrency",
        f"{prefix}/min-scale": str(unit.min_warm),
        f"{prefix}/max-scale": str(unit.max_instances),
        f"{prefix}/scale-down-delay": f"{idle_s}s",
        f"{prefix}/scale-to-zero-pod-retention-period": f"{idle_s}s",
        f"{prefix}/target": str(model.target_concurrency),
        f"{prefix}/target-utilization-percentage": "100",
    }
