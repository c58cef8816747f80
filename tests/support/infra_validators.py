"""Validators of rendered documents that are not ours: schemas of the API servers, cfn-lint, SAM's translator.

Each takes documents and raises AssertionError with the validator's message. Schemas of custom resources lie next to the
checkout, or where TENERAL_TEST_CRDS says (they are other projects' data); without them those kinds are named in a skip.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(os.environ.get("TENERAL_TEST_CRDS") or Path(__file__).parents[2].parent / "shared" / "crds")
CRD_FILES = {
    "Service": "kn-service.yaml",  # Knative's; plain Kubernetes' is distinguished by its apiVersion
    "Configuration": "kn-service.yaml",
    "Route": "kn-service.yaml",
    "InferenceService": "kserve-isvc.yaml",
    "ScaledObject": "keda-scaledobject.yaml",
    "InterceptorRoute": "keda-ir.yaml",
    "RayService": "rayservice.yaml",
}
GATEWAY_FILE = "gateway-httproute.yaml"
TRIGGERS_FILE = "keda-scalers-schema.json"
KUBERNETES_VERSION = "1.34"


def read_documents(text: str) -> list[Any]:
    """Of YAML, by libyaml where it is there, which takes a tenth of the time."""
    return list(yaml.load_all(text, Loader=_loader()))


def is_custom(document: Mapping[str, Any]) -> bool:
    return document["kind"] in CRD_FILES and document["apiVersion"] != "v1"


def are_schemas_there() -> bool:
    return CRDS.is_dir()


def check_custom(document: Mapping[str, Any]) -> None:
    """By its CRD's schema, in which keys that the schema does not name are errors."""
    import jsonschema

    kind = document["kind"]
    name = GATEWAY_FILE if kind == "HTTPRoute" else CRD_FILES[kind]
    schema = _custom_schema(kind, name, document["apiVersion"].rpartition("/")[2])
    validator = jsonschema.Draft202012Validator(schema)
    errors = [
        f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
        for error in validator.iter_errors(document)
    ]
    assert not errors, f"{kind} {document['metadata']['name']}: {errors}"
    if kind == "ScaledObject":
        check_triggers(document)


def check_triggers(document: Mapping[str, Any]) -> None:
    """By KEDA's own list of parameters: those that a trigger needs are there, and no others."""
    known = _triggers()
    for trigger in document["spec"]["triggers"]:
        parameters = known[trigger["type"]]
        needed = {
            name for name, each in parameters.items() if not each.get("optional") and "default" not in each
        }
        given = trigger["metadata"]
        assert needed <= set(given), f"{trigger['type']} lacks {needed - set(given)}"
        assert all(isinstance(value, str) for value in given.values())
        if trigger["type"] != "external-push":  # all others go to the scaler that it names
            assert set(given) <= set(parameters), (
                f"{trigger['type']} does not know {set(given) - set(parameters)}"
            )


@functools.cache
def _triggers() -> dict[str, dict[str, Any]]:
    scalers = json.loads((CRDS / TRIGGERS_FILE).read_text(encoding="utf-8"))["scalers"]
    return {each["type"]: {one["name"]: one for one in each["parameters"]} for each in scalers}


@functools.cache
def _custom_schema(kind: str, name: str, version: str) -> dict[str, Any]:
    with open(CRDS / name, encoding="utf-8") as file:
        found = [document for document in yaml.load_all(file, Loader=_loader()) if document]
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in found[0]["spec"]["versions"]}
    schema = copy.deepcopy(versions[version])
    for name in ("apiVersion", "kind", "metadata"):
        schema["properties"][name] = {}
    if kind in ("Configuration", "Route"):  # a Service's spec is both of theirs
        spec = schema["properties"]["spec"]
        names = ("template",) if kind == "Configuration" else ("traffic",)
        spec["properties"] = {name: spec["properties"][name] for name in names}
    return _strict(schema)


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if strict.pop("x-kubernetes-int-or-string", None):
        strict.pop("type", None)
        strict.pop("pattern", None) if isinstance(strict.get("pattern"), str) else None
    if isinstance(strict.get("properties"), dict) and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def check_builtin(document: Mapping[str, Any]) -> None:
    """By Kubernetes' own schema, unknown keys refused."""
    _kubernetes_validate().validate(dict(document), KUBERNETES_VERSION, strict=True)


@functools.cache
def _kubernetes_validate() -> Any:
    """Its schemas are read once; left to itself it reads 2 MB for each document."""
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)
    utils.all_versions = functools.cache(utils.all_versions)
    return utils


def check_kubernetes(documents: Iterable[Mapping[str, Any]]) -> set[str]:
    """All of them; returns the kinds that nothing here knows."""
    unknown = set()
    for document in documents:
        if is_custom(document):
            if are_schemas_there():
                check_custom(document)
            else:
                unknown.add(document["kind"])
        elif document["apiVersion"].startswith("gateway.networking"):
            check_gateway_route(document)
            if (CRDS / GATEWAY_FILE).exists():
                check_custom(document)
        else:
            check_builtin(document)
        check_admission(document)
    return unknown


def check_gateway_route(document: Mapping[str, Any]) -> None:
    """Gateway API's bounds on what is rendered here, from its API reference (v1.4); its schema where it is at hand."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(document["spec"]) == {"parentRefs", "hostnames", "rules"}
    for rule in document["spec"]["rules"]:
        assert set(rule) <= {"backendRefs", "filters", "timeouts"}
        assert 1 <= len(rule["backendRefs"]) <= 16
        for backend in rule["backendRefs"]:
            assert set(backend) == {"name", "port", "weight"}
            assert 0 <= backend["weight"] <= 1_000_000
        for each in rule.get("filters", ()):
            assert each["type"] == "RequestMirror"
            assert set(each["requestMirror"]) <= {"backendRef", "percent"}


def check_admission(document: Mapping[str, Any]) -> None:
    """Rules of admission webhooks that no schema holds."""
    kind, spec = document["kind"], document.get("spec", {})
    assert len(document["metadata"]["name"]) <= 63
    if kind == "ScaledObject":  # keda #2314: 0 is the only idle count of use, and it is below the least
        assert spec.get("idleReplicaCount", 0) == 0
        assert "idleReplicaCount" not in spec or spec["minReplicaCount"] > 0
        assert spec["minReplicaCount"] <= spec["maxReplicaCount"]
        window = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert 0 <= window["stabilizationWindowSeconds"] <= 3600
    if is_custom(document) and document["apiVersion"].startswith("serving.knative.dev"):
        if template := spec.get("template"):
            annotations = template["metadata"]["annotations"]
            assert "autoscaling.knative.dev/initial-scale" not in annotations
            assert template["spec"]["timeoutSeconds"] <= 3600
        if traffic := spec.get("traffic"):
            assert sum(each["percent"] for each in traffic) == 100


POD_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}


def check_pod_security(document: Mapping[str, Any]) -> int:
    """The pod security standard `restricted`, of each pod in a document; returns how many there are."""
    pods = list(_pods(document))
    for pod in pods:
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}
        for volume in pod.get("volumes", ()):
            assert set(volume) - {"name"} <= POD_VOLUMES, volume
        assert set(pod.get("securityContext", {})) <= {"fsGroup", "fsGroupChangePolicy"}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not context.keys() & {"privileged", "procMount", "seLinuxOptions", "appArmorProfile"}
            assert not [port for port in container.get("ports", ()) if "hostPort" in port]
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert "host" not in container.get(name, {}).get("httpGet", {})
    return len(pods)


SECRET_NAME = re.compile(r"(?i)secret|password|api_?key|token$|credential")
SENSITIVE_PORTS = frozenset({22})


def lint_cluster(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The findings of kube-linter's default checks in documents that are applied together, by the checks' names; those
    of pods' security contexts and of the host's namespaces and files are `check_pod_security`'s.
    """
    found: list[str] = []
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
        if "extensions/v1beta" in document["apiVersion"]:
            found.append("no-extensions-v1beta")
        for pod in _pods(document):
            found += _lint_pod(pod)
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in by_kind.get("Deployment", ())]
    accounts = {each["metadata"]["name"] for each in by_kind.get("ServiceAccount", ())}
    for deployment in by_kind.get("Deployment", ()):
        spec = deployment["spec"]
        if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
            found.append("mismatching-selector")
        if spec["template"]["spec"].get("serviceAccountName") not in accounts:
            found.append("non-existent-service-account")
        if spec.get("replicas", 1) > 1 and "podAntiAffinity" not in str(spec):
            found.append("no-anti-affinity")
    for service in by_kind.get("Service", ()):
        selector = service["spec"].get("selector")  # of Knative's kind none
        if selector is not None and not any(selector.items() <= each.items() for each in labels):
            found.append("dangling-service")
        for port in service["spec"].get("ports", ()):
            target = port.get("targetPort", port["port"])
            if not (
                0 < target < 65_536 if isinstance(target, int) else re.fullmatch("[a-z0-9-]{1,15}", target)
            ):
                found.append("invalid-target-ports")
    for budget in (each["spec"] for each in by_kind.get("PodDisruptionBudget", ())):
        if budget.get("maxUnavailable", 1) in (0, "0%"):
            found.append("pdb-max-unavailable")
        if budget.get("minAvailable") == "100%":
            found.append("pdb-min-available")
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            found.append("pdb-unhealthy-pod-eviction-policy")
    return found


def _lint_pod(pod: Mapping[str, Any]) -> Iterator[str]:
    if "serviceAccount" in pod:
        yield "deprecated-service-account-field"
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        names = [each["name"] for each in container.get("env", ())]
        if len(names) != len(set(names)):
            yield "duplicate-env-var"
        if any(SECRET_NAME.search(each["name"]) and "value" in each for each in container.get("env", ())):
            yield "env-var-secret"
        if not re.search("@sha256:|:(?!latest)[^/]+$", container["image"]):
            yield "latest-tag"
        if not container["securityContext"].get("readOnlyRootFilesystem"):
            yield "no-read-only-root-fs"
        sizes = container.get("resources", {})
        for size in ("cpu", "memory"):
            if not all(size in sizes.get(kind, {}) for kind in ("requests", "limits")):
                yield f"unset-{size}-requirements"
        ports = {port["containerPort"] for port in container.get("ports", ())}
        if ports & SENSITIVE_PORTS:
            yield "ssh-port"
        for probe in ("liveness", "readiness", "startup"):
            port = container.get(f"{probe}Probe", {}).get("httpGet", {}).get("port")
            if port is not None and port not in ports:
                yield f"{probe}-port"


def _pods(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _pods(each)


def check_cloudformation(text: str) -> None:
    """cfn-lint, with SAM templates translated first; warnings count."""
    from cfnlint import lint
    from cfnlint.config import ManualArgs

    matches = lint(text, config=ManualArgs(regions=["eu-central-1"], include_checks=["W", "E"]))
    findings = [f"{match.rule.id} {match.message} at {match.linenumber}" for match in matches]
    assert not findings, findings


def check_policies(template: Mapping[str, Any]) -> None:
    """No statement of a role allows every action or, but for what AWS knows no narrower name of, every resource."""
    free = {"ecr:GetAuthorizationToken", "cloudwatch:PutMetricData"}
    for resource in template["Resources"].values():
        if resource["Type"] != "AWS::IAM::Role":
            continue
        assert "ManagedPolicyArns" not in resource["Properties"]
        for policy in resource["Properties"].get("Policies", ()):
            for statement in policy["PolicyDocument"]["Statement"]:
                assert all("*" not in action for action in statement["Action"]), statement
                if "*" in statement["Resource"]:
                    assert set(statement["Action"]) <= free, statement


def check_requests(template: Mapping[str, Any]) -> None:
    """The shapes of AWS's own API, where a resource of the template is one of its requests nearly word for word."""
    import boto3
    from botocore.validate import ParamValidator

    operations = {
        "AWS::ApplicationAutoScaling::ScalingPolicy": ("application-autoscaling", "PutScalingPolicy"),
        "AWS::ApplicationAutoScaling::ScalableTarget": ("application-autoscaling", "RegisterScalableTarget"),
        "AWS::CloudWatch::Alarm": ("cloudwatch", "PutMetricAlarm"),
        "AWS::SageMaker::EndpointConfig": ("sagemaker", "CreateEndpointConfig"),
        "AWS::SageMaker::InferenceComponent": ("sagemaker", "CreateInferenceComponent"),
        "AWS::SageMaker::Model": ("sagemaker", "CreateModel"),
    }
    for name, resource in template["Resources"].items():
        if resource["Type"] not in operations:
            continue
        service, operation = operations[resource["Type"]]
        shape = _shapes(boto3, service).operation_model(operation).input_shape
        given = _plain(resource["Properties"])
        given.pop("ScalingTargetId", None)
        required = {key: "x" for key in shape.required_members if key not in given}
        report = ParamValidator().validate({**required, **given}, shape)
        assert not report.has_errors(), f"{name}: {report.generate_report()}"


@functools.cache
def _shapes(boto3: Any, service: str) -> Any:
    return boto3.client(
        service, region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x"
    ).meta.service_model


def _plain(value: Any) -> Any:
    """CloudFormation's functions as texts: their results are."""
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value)) in ("Ref", "Fn::Sub", "Fn::GetAtt"):
            return json.dumps(value)[:60]
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
