"""KServe in its Knative mode: an InferenceService a model, with Teneral's container as a custom predictor.

Two versions are two documents of the same name, applied one after the other: the second one's
`canaryTrafficPercent` is its share, the rest stays with the first.
"""

from __future__ import annotations

from typing import Any

from ...handlers.pool.values import Model
from .documents import RenderedDocument, Rendering
from .knative import check_drain, scaling_annotations
from .limits import Unit, check_limits, units_of
from .pods import container, labels, probes, service_account, volumes, whole_seconds


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    check_drain(rendering, model)
    units = units_of(rendering, model, platform_setting="kserve")
    base = units[0].base
    documents = [
        RenderedDocument("ServiceAccount", base, service_account(units[0]), f"{base}.service-account.yaml")
    ]
    if len(units) == 1:
        return [*documents, _inference_service(units[0], canary=None, file=f"{base}.inference-service.yaml")]
    return documents + [
        _inference_service(
            unit,
            canary=unit.weight if number > 1 else None,
            file=f"{base}.{number}-inference-service-v{unit.version}.yaml",
        )
        for number, unit in enumerate(units, 1)
    ]


def _inference_service(unit: Unit, *, canary: int | None, file: str) -> RenderedDocument:
    model = unit.model
    annotations = {"serving.kserve.io/deploymentMode": "Knative", **_idle_annotations(unit)}
    tests = probes(unit)
    tests.pop("startupProbe")  # as on Knative
    predictor: dict[str, Any] = {
        "serviceAccountName": unit.base,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "minReplicas": unit.min_warm,
        "maxReplicas": unit.max_instances,
        "scaleMetric": "concurrency",
        "scaleTarget": model.target_concurrency,
        "containerConcurrency": model.max_concurrency,
        "timeout": whole_seconds(model.request_timeout_s),
        "containers": [{**container(unit, port_name="http1", name="kserve-container"), **tests}],
        "volumes": volumes(unit),
    }
    if canary is not None:
        predictor["canaryTrafficPercent"] = canary
    body = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": unit.base, "labels": labels(unit), "annotations": annotations},
        "spec": {"predictor": predictor},
    }
    return RenderedDocument("InferenceService", unit.base, body, file)


def _idle_annotations(unit: Unit) -> dict[str, str]:
    """Of Knative's annotations, those for which KServe has no field."""
    names = ("scale-down-delay", "scale-to-zero-pod-retention-period", "target-utilization-percentage")
    found = scaling_annotations(unit)
    return {f"autoscaling.knative.dev/{name}": found[f"autoscaling.knative.dev/{name}"] for name in names}
