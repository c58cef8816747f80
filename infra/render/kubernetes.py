"""Plain Kubernetes with KEDA: a Deployment and a Service a version, and what scales it; and the values of the
Helm chart `infra/helm/teneral`, which has a schema of them.

With `min_warm = 0` requests go through KEDA's HTTP add-on (0.14 or newer: InterceptorRoute), which holds them while the
first instance starts; otherwise a Prometheus query counts the requests in work. A Prometheus trigger alone never wakes
a model from zero, because nothing holds its request.

The chart makes the same documents from the pool's own keys: `helm upgrade --set models.chat.min_warm=2` does
what the key in the file would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import SCRATCH_BYTES, RenderedDocument, Rendering
from .limits import END_S, Unit, check_limits, units_of
from .pods import (
    PORT,
    USER_ID,
    container,
    cpu_quantity,
    labels,
    memory_quantity,
    metadata,
    probes,
    service_account,
    volume_sizes,
    volumes,
    whole_seconds,
)

INTERCEPTOR = "keda-add-ons-http-interceptor-proxy.keda.svc.cluster.local"
SCALER = "keda-add-ons-http-external-scaler.keda:9090"
# Endpoints still send requests for a moment after a pod began to end; SIGTERM waits for that long,
# within the pod's grace period.
ROUTES_FORGET_S = 3


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check(rendering, model)
    units = units_of(rendering, model, sets_drain=True)
    base = units[0].base
    documents = [
        RenderedDocument("ServiceAccount", base, service_account(units[0]), f"{base}.service-account.yaml")
    ]
    for unit in units:
        documents += _unit_documents(rendering, unit)
    if len(units) > 1:
        documents.append(_split(rendering, units))
    return documents


def check(rendering: Rendering, model: Model) -> None:
    """Limits, and E7 where several versions share an address that nothing would hold requests for."""
    check_limits(rendering, model)
    if model.min_warm > 0:
        rendering.warn(
            Code.W1,
            model,
            "buffer",
            "is left out: KEDA keeps spare instances only for models that scale to zero",
            always=model.buffer > 0,
        )
    elif len(model.named_versions()) > 1 and model.is_versioned:
        raise rendering.error(
            Code.E7,
            model,
            "min_warm",
            "is 0, and the HTTP add-on, which holds requests meanwhile, does not divide traffic among versions",
            hint="Set min_warm = 1, serve one version, or render for knative.",
        )
    if model.shadow and not model.is_versioned:
        rendering.warn(Code.W1, model, "shadow", "is left out: the source has no versions", always=True)


def _unit_documents(rendering: Rendering, unit: Unit) -> list[RenderedDocument]:
    bodies = [_deployment(unit)]
    if unit.min_warm or unit.weight == 0:
        bodies += [_service(unit, unit.name)]
        bodies += [_scaled_object(unit, _prometheus_trigger(rendering, unit))] if unit.min_warm else []
    else:
        bodies += [
            _service(unit, f"{unit.name}-instances"),
            _front(unit),
            _interceptor_route(unit),
            _scaled_object(unit, _interceptor_trigger(unit)),
        ]
    if unit.max_instances > 1:
        bodies.append(_disruption_budget(unit))
    bodies.append(_network_policy(unit))
    return [_document(body) for body in bodies]


def _document(body: dict[str, Any]) -> RenderedDocument:
    kind, name = body["kind"], body["metadata"]["name"]
    dashed = "".join(f"-{char.lower()}" if char.isupper() else char for char in kind).strip("-")
    return RenderedDocument(kind, name, body, f"{name}.{dashed.replace('h-t-t-p-', 'http-')}.yaml")


def _deployment(unit: Unit) -> dict[str, Any]:
    drain_s = whole_seconds(unit.drain_s)
    pod: dict[str, Any] = {
        "serviceAccountName": unit.base,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ROUTES_FORGET_S + drain_s + END_S,
        **_spread(unit),
        # A volume that a patch puts in place of an empty one is the image's user's, too.
        "securityContext": {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [
            {
                **container(unit),
                **probes(unit),
                "lifecycle": {"preStop": {"sleep": {"seconds": ROUTES_FORGET_S}}},
            }
        ],
        "volumes": volumes(unit),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(unit),
        "spec": {
            # No `replicas`: KEDA sets them, and applying this again must not undo that.
            **({} if unit.min_warm or unit.weight else {"replicas": 1}),
            "revisionHistoryLimit": 3,
            "selector": _selector(unit),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels(unit), "annotations": _scraped()}, "spec": pod},
        },
    }


def _selector(unit: Unit) -> dict[str, Any]:
    return {"matchLabels": {"app.kubernetes.io/name": unit.name}}


def _spread(unit: Unit) -> dict[str, Any]:
    """Instances go to different zones and nodes, where there are some; one that finds none starts all the same."""
    if unit.max_instances == 1:
        return {}
    constraints = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": _selector(unit),
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]
    return {"topologySpreadConstraints": constraints}


def _scraped() -> dict[str, str]:
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}


def _service(unit: Unit, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(unit, name=name),
        "spec": {
            "selector": {"app.kubernetes.io/name": unit.name},
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def _front(unit: Unit) -> dict[str, Any]:
    """The model's name for clients: the interceptor, which finds the route by the host that they asked for."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(unit),
        "spec": {
            "type": "ExternalName",
            "externalName": INTERCEPTOR,
            "ports": [{"name": "http", "port": PORT}],
        },
    }


def _interceptor_route(unit: Unit) -> dict[str, Any]:
    model = unit.model
    return {
        "apiVersion": "http.keda.sh/v1beta1",
        "kind": "InterceptorRoute",
        "metadata": metadata(unit),
        "spec": {
            "target": {"service": f"{unit.name}-instances", "port": PORT},
            "rules": [{"hosts": [unit.name]}],
            "scalingMetric": {"concurrency": {"targetValue": model.target_concurrency}},
            "timeouts": {
                "readiness": f"{whole_seconds(model.queue_timeout_s)}s",
                "request": f"{whole_seconds(model.request_timeout_s + model.queue_timeout_s)}s",
            },
        },
    }


def _interceptor_trigger(unit: Unit) -> dict[str, Any]:
    return {"type": "external-push", "metadata": {"scalerAddress": SCALER, "interceptorRoute": unit.name}}


def _prometheus_trigger(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": rendering.options.prometheus,
            "query": f'sum(teneral_http_in_flight{{pod=~"{unit.name}-[a-z0-9]+-[a-z0-9]+"}}) or vector(0)',
            "threshold": str(unit.model.target_concurrency),
        },
    }


def _scaled_object(unit: Unit, trigger: dict[str, Any]) -> dict[str, Any]:
    """`idleReplicaCount` is 0 or absent, and below `minReplicaCount`: KEDA takes no other values."""
    idle_s = whole_seconds(unit.model.idle_timeout_s)
    least = unit.min_warm
    spare: dict[str, Any] = {}
    if unit.min_warm == 0 and unit.model.buffer:
        least, spare = 1 + unit.model.buffer, {"idleReplicaCount": 0}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(unit),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": unit.name},
            **spare,
            "minReplicaCount": least,
            "maxReplicaCount": max(unit.max_instances, least),
            "pollingInterval": 5,
            "cooldownPeriod": idle_s,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {
                            "stabilizationWindowSeconds": 0,
                            "policies": [{"type": "Percent", "value": 100, "periodSeconds": 5}],
                        },
                        "scaleDown": {
                            "stabilizationWindowSeconds": idle_s,
                            "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
                        },
                    }
                }
            },
            "triggers": [trigger],
        },
    }


def _disruption_budget(unit: Unit) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(unit),
        "spec": {
            "maxUnavailable": 1,
            # An instance that serves nothing holds no drain up.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": _selector(unit),
        },
    }


def _network_policy(unit: Unit) -> dict[str, Any]:
    """Requests at the server's port alone. Where they may come from, and what an instance may reach, is a patch's:
    stores have names, and policies know addresses.
    """
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(unit),
        "spec": {
            "podSelector": _selector(unit),
            "ingress": [{"ports": [{"protocol": "TCP", "port": PORT}]}],
        },
    }


def _split(rendering: Rendering, units: list[Unit]) -> RenderedDocument:
    """Traffic by weight, and copies for a shadow, in Gateway API's terms."""
    model, base = units[0].model, units[0].base
    rule: dict[str, Any] = {
        "backendRefs": [{"name": unit.name, "port": PORT, "weight": unit.weight} for unit in units],
        "timeouts": {"request": f"{whole_seconds(model.request_timeout_s)}s"},
    }
    if model.shadow:
        mirror: dict[str, Any] = {"backendRef": {"name": f"{base}-v{model.shadow.version}", "port": PORT}}
        if model.shadow.percent < 100:
            mirror["percent"] = model.shadow.percent
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": mirror}]
    body = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": base, "labels": {"app.kubernetes.io/part-of": "teneral"}},
        "spec": {
            "parentRefs": [{"name": rendering.options.gateway}],
            "hostnames": [base],
            "rules": [rule],
        },
    }
    return _document(body)


def render_pool(rendering: Rendering, models: Sequence[Model]) -> list[RenderedDocument]:
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
    return [RenderedDocument("Values", "teneral", body, "values.yaml")]


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
