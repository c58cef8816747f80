"""AWS Lambda: a SAM template a model, with its role, its log group, a streaming URL and alarms."""

from __future__ import annotations

import json
from typing import Any

from ...handlers.pool.values import Code, Model
from .aws import (
    check_image,
    environment,
    log_group,
    log_statement,
    role,
    secret_parameters,
    store_statements,
    template,
    template_document,
)
from .documents import SCRATCH_BYTES, RenderedDocument, Rendering
from .limits import MIB, Unit, check_limits, units_of
from .pods import whole_seconds

MB_PER_CORE = 1769  # of memory, for each of which Lambda gives a core
MAX_ENVIRONMENT_BYTES = 4096
MIN_DISK_MB, MAX_DISK_MB = 512, 10_240
SETTINGS_OF_OTHERS = (
    "TENERAL_MAX_WAIT_S",
    "TENERAL_MAX_QUEUED",
    "TENERAL_MAX_RUNNING",
)  # one invocation at a time


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    unit = units_of(rendering, model)[0]
    check_image(rendering, unit)
    _check_sizes(rendering, unit)
    resources = {
        "Logs": log_group(f"/teneral/lambda/{unit.base}"),
        "Role": role("lambda", [log_statement(), *store_statements([unit])], condition=False),
        "Function": {"Type": "AWS::Serverless::Function", "Properties": _function(unit)},
        **_alarms(unit),
    }
    outputs = {
        "Function": {"Value": {"Ref": "Function"}},
        "Url": {"Value": {"Fn::GetAtt": ["FunctionUrl", "FunctionUrl"]}},
    }
    body = template(
        f"Teneral: {model.name} on AWS Lambda",
        parameters=secret_parameters([unit]),
        resources=resources,
        outputs=outputs,
    )
    return [template_document(unit.base, {"Transform": "AWS::Serverless-2016-10-31", **body})]


def _check_sizes(rendering: Rendering, unit: Unit) -> None:
    model = unit.model
    if _memory_mb(unit) * 1.05 < unit.cpu * MB_PER_CORE:
        rendering.warn(
            Code.W2,
            model,
            "instance.cpu",
            f"is approximated by {_memory_mb(unit) / MB_PER_CORE:.1f} cores: "
            f"Lambda gives one for each {MB_PER_CORE:,} MB of memory",
            always=True,
        )
    if _disk_mb(unit) > MAX_DISK_MB:
        raise rendering.error(
            Code.E6,
            model,
            "serve",
            f"keeps {unit.disk_bytes / MIB:,.0f} MiB of files; Lambda's EphemeralStorage has at most {MAX_DISK_MB} MB",
            hint="Lower cache_bytes or kv_disk_bytes.",
        )
    size = len(json.dumps(_environment(unit)))
    if size > MAX_ENVIRONMENT_BYTES:
        raise rendering.error(
            Code.E6,
            model,
            "serve",
            f"becomes {size:,} bytes of variables, and Lambda takes {MAX_ENVIRONMENT_BYTES:,}",
        )


def _environment(unit: Unit) -> dict[str, Any]:
    """Answers are streamed unless the file says otherwise: the URL below is of that kind."""
    variables = {"TENERAL_LAMBDA_STREAMING": "true", **environment(unit)}
    return {name: variables[name] for name in sorted(variables) if name not in SETTINGS_OF_OTHERS}


def _function(unit: Unit) -> dict[str, Any]:
    model = unit.model
    properties: dict[str, Any] = {
        "PackageType": "Image",
        "ImageUri": unit.image,
        "ImageConfig": {"Command": ["serve"]},
        "Architectures": ["x86_64"],
        "Role": {"Fn::GetAtt": ["Role", "Arn"]},
        "MemorySize": _memory_mb(unit),
        "EphemeralStorage": {"Size": _disk_mb(unit)},
        "Timeout": whole_seconds(model.request_timeout_s),
        "Environment": {"Variables": _environment(unit)},
        "LoggingConfig": {"LogFormat": "JSON", "LogGroup": {"Ref": "Logs"}},
        "ReservedConcurrentExecutions": model.max_instances,
        "AutoPublishAlias": "live",
        "FunctionUrlConfig": {
            "AuthType": "AWS_IAM",
            "InvokeMode": "RESPONSE_STREAM" if _streams(unit) else "BUFFERED",
        },
    }
    if model.min_warm:
        properties["ProvisionedConcurrencyConfig"] = {"ProvisionedConcurrentExecutions": model.min_warm}
    return properties


def _streams(unit: Unit) -> bool:
    return bool(unit.model.serve.get("lambda_streaming", True))


def _memory_mb(unit: Unit) -> int:
    return -(-unit.memory_bytes // MIB)


def _disk_mb(unit: Unit) -> int:
    return max(MIN_DISK_MB, -(-(unit.disk_bytes and unit.disk_bytes + SCRATCH_BYTES) // MIB))


def _alarms(unit: Unit) -> dict[str, Any]:
    """Requests that were refused, and, where instances are kept warm, those that found none of them free."""
    alarms = {"Refused": _alarm("Throttles", "Requests were refused: every instance is in work.")}
    if unit.model.min_warm:
        description = "Requests found no provisioned instance free and started cold."
        alarms["Spilled"] = _alarm("ProvisionedConcurrencySpilloverInvocations", description)
    return alarms


def _alarm(metric: str, description: str) -> dict[str, Any]:
    return {
        "Type": "AWS::CloudWatch::Alarm",
        "Properties": {
            "AlarmDescription": description,
            "Namespace": "AWS/Lambda",
            "MetricName": metric,
            "Dimensions": [{"Name": "FunctionName", "Value": {"Ref": "Function"}}],
            "Statistic": "Sum",
            "Period": 60,
            "EvaluationPeriods": 5,
            "DatapointsToAlarm": 3,
            "Threshold": 0,
            "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": "notBreaching",
        },
    }
