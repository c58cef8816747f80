"""SageMaker: a CloudFormation template a model.

One version is an inference component, whose copies and whose instances scale down to zero; requests
then fail, and an alarm wakes the endpoint (W3). Two versions, or a shadow, are variants of one
endpoint, which keep an instance each (E7 at zero).
"""

from __future__ import annotations

from typing import Any

from ...handlers.pool.values import Code, Model
from .aws import (
    check_image,
    environment,
    pull_statements,
    role,
    scaling_policy,
    secret_parameters,
    store_statements,
    template,
    template_document,
)
from .documents import SCRATCH_BYTES, RenderedDocument, Rendering
from .limits import MIB, READ, Unit, check_limits, units_of

GIB = 1 << 30
# Type → cores, GiB of memory, GPUs, smallest first; docs.aws.amazon.com/sagemaker "instance types".
INSTANCES = {
    "ml.m5.large": (2, 8, 0),
    "ml.m5.xlarge": (4, 16, 0),
    "ml.m5.2xlarge": (8, 32, 0),
    "ml.m5.4xlarge": (16, 64, 0),
    "ml.m5.12xlarge": (48, 192, 0),
    "ml.m5.24xlarge": (96, 384, 0),
    "ml.g5.xlarge": (4, 16, 1),
    "ml.g5.2xlarge": (8, 32, 1),
    "ml.g5.4xlarge": (16, 64, 1),
    "ml.g5.8xlarge": (32, 128, 1),
    "ml.g5.12xlarge": (48, 192, 4),
    "ml.g5.48xlarge": (192, 768, 8),
}
SYSTEM_BYTES = 1 * GIB  # of an instance's memory, for the host itself
# Families without disks of their own get a volume where copies keep files: theirs, and room for the image.
VOLUME_FAMILIES = ("ml.m5.",)
IMAGE_GIB, MAX_VOLUME_GIB = 10, 512
START_S = 900  # longest load: SageMaker gives up on a container after this
VARIANT = "main"


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    units = units_of(rendering, model, platform_setting="sagemaker")
    image = check_image(rendering, units[0])
    if model.min_warm == 0:
        _check_zero(rendering, model, units)
    statements = [
        *store_statements(units),
        *pull_statements(image),
        {
            "Effect": "Allow",
            "Action": ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": [
                {
                    "Fn::Sub": "arn:${AWS::Partition}:logs:${AWS::Region}:${AWS::AccountId}:log-group:/aws/sagemaker/*"
                }
            ],
        },
        {
            "Effect": "Allow",
            "Action": ["cloudwatch:PutMetricData"],
            "Resource": ["*"],
            "Condition": {"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}},
        },
    ]
    parts = _component(rendering, units[0]) if len(units) == 1 else _variants(rendering, units)
    body = template(
        f"Teneral: {model.name} on SageMaker",
        parameters=secret_parameters(units),
        resources={"Role": role("sagemaker", statements), **parts},
        outputs={"Endpoint": {"Value": {"Fn::GetAtt": ["Endpoint", "EndpointName"]}}},
    )
    return [template_document(units[0].base, body)]


def _check_zero(rendering: Rendering, model: Model, units: list[Unit]) -> None:
    if len(units) > 1:
        raise rendering.error(
            Code.E7,
            model,
            "min_warm",
            "is 0, and SageMaker's variants, which divide traffic among versions, keep an instance each",
            hint="Set min_warm = 1, or serve one version.",
        )
    rendering.warn(
        Code.W3,
        model,
        "min_warm",
        "is 0: requests fail for minutes while the endpoint wakes; an alarm wakes it at the first one",
        always=True,
    )


def _instance_type(rendering: Rendering, unit: Unit) -> str:
    """The smallest instance type in which a copy fits."""
    for name, (cores, gib, gpus) in INSTANCES.items():
        fits = cores >= unit.cpu and gib * GIB - SYSTEM_BYTES >= unit.memory_bytes and gpus >= unit.gpu
        if fits and (gpus > 0) == (unit.gpu > 0):
            return name
    raise rendering.error(
        Code.E6,
        unit.model,
        "instance.memory",
        f"is {unit.memory_bytes / MIB:,.0f} MiB with {unit.cpu:g} cores and {unit.gpu} GPUs, "
        "more than any instance type of SageMaker's that is known here",
        hint=f"Known are {', '.join(INSTANCES)} (read on {READ}); a [[patch]] may name another one.",
    )


def _volume(rendering: Rendering, unit: Unit, instance_type: str, copies: int) -> dict[str, Any]:
    if not unit.disk_bytes or not instance_type.startswith(VOLUME_FAMILIES):
        return {}
    size_gib = IMAGE_GIB + copies * -(-(unit.disk_bytes + SCRATCH_BYTES) // GIB)
    if size_gib > MAX_VOLUME_GIB:
        raise rendering.error(
            Code.E6,
            unit.model,
            "serve",
            f"keeps files that need a volume of {size_gib} GiB, and an instance has at most {MAX_VOLUME_GIB} GiB",
            hint="Lower cache_bytes or kv_disk_bytes.",
        )
    return {"VolumeSizeInGB": size_gib}


def _copies(instance_type: str, unit: Unit) -> int:
    """Copies that fit in one instance."""
    cores, gib, _ = INSTANCES[instance_type]
    return max(1, min(int(cores / unit.cpu), (gib * GIB - SYSTEM_BYTES) // unit.memory_bytes))


def _container(unit: Unit) -> dict[str, Any]:
    return {"Image": unit.image, "Environment": environment(unit)}


def _component(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    """An endpoint with one variant, and the model as a component of it."""
    instance_type = _instance_type(rendering, unit)
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": instance_type,
        **_volume(rendering, unit, instance_type, _copies(instance_type, unit)),
        "InitialInstanceCount": max(1, unit.min_warm),
        "ManagedInstanceScaling": {
            "Status": "ENABLED",
            "MinInstanceCount": unit.min_warm,
            "MaxInstanceCount": unit.max_instances,
        },
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        "ContainerStartupHealthCheckTimeoutInSeconds": START_S,
    }
    compute: dict[str, Any] = {
        "MinMemoryRequiredInMb": -(-unit.memory_bytes // MIB),
        "NumberOfCpuCoresRequired": unit.cpu,
    }
    if unit.gpu:
        compute["NumberOfAcceleratorDevicesRequired"] = unit.gpu
    component = {
        "EndpointName": {"Fn::GetAtt": ["Endpoint", "EndpointName"]},
        "InferenceComponentName": unit.base,
        "VariantName": VARIANT,
        "RuntimeConfig": {"CopyCount": max(1, unit.min_warm)},
        "Specification": {
            "Container": _container(unit),
            "ComputeResourceRequirements": compute,
            "StartupParameters": {"ContainerStartupHealthCheckTimeoutInSeconds": START_S},
        },
    }
    config = {
        "ExecutionRoleArn": {"Fn::GetAtt": ["Role", "Arn"]},
        "ProductionVariants": [variant],
    }
    found: dict[str, Any] = {
        "Config": {"Type": "AWS::SageMaker::EndpointConfig", "Properties": config},
        "Endpoint": _endpoint(),
        "Component": {"Type": "AWS::SageMaker::InferenceComponent", "Properties": component},
        "Scaling": _scalable(
            "inference-component:DesiredCopyCount",
            f"inference-component/{unit.base}",
            unit,
            after="Component",
        ),
        "ScalingPolicy": _policy(unit, "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"),
    }
    return {**found, **(_waking(unit) if unit.min_warm == 0 else {})}


def _endpoint() -> dict[str, Any]:
    name = {"Fn::GetAtt": ["Config", "EndpointConfigName"]}
    return {"Type": "AWS::SageMaker::Endpoint", "Properties": {"EndpointConfigName": name}}


def _scalable(dimension: str, resource: Any, unit: Unit, *, after: str = "") -> dict[str, Any]:
    scalable: dict[str, Any] = {
        "Type": "AWS::ApplicationAutoScaling::ScalableTarget",
        "Properties": {
            "ServiceNamespace": "sagemaker",
            "ScalableDimension": f"sagemaker:{dimension}",
            "ResourceId": resource,
            "MinCapacity": unit.min_warm,
            "MaxCapacity": max(unit.max_instances, unit.min_warm),
        },
    }
    return {**scalable, "DependsOn": after} if after else scalable


def _policy(unit: Unit, metric: str, suffix: str = "") -> dict[str, Any]:
    return scaling_policy(unit, suffix, {"PredefinedMetricType": metric}, unit.model.target_concurrency)


def _waking(unit: Unit) -> dict[str, Any]:
    """From zero to one: an alarm on requests that found no capacity, and its step."""
    step = {
        "AdjustmentType": "ChangeInCapacity",
        "MetricAggregationType": "Maximum",
        "Cooldown": 60,
        "StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}],
    }
    return {
        "WakingPolicy": {
            "Type": "AWS::ApplicationAutoScaling::ScalingPolicy",
            "Properties": {
                "PolicyName": "wake",
                "PolicyType": "StepScaling",
                "ScalingTargetId": {"Ref": "Scaling"},
                "StepScalingPolicyConfiguration": step,
            },
        },
        "NoCapacity": {
            "Type": "AWS::CloudWatch::Alarm",
            "Properties": {
                "AlarmDescription": "A request found no copy of the model: start one.",
                "Namespace": "AWS/SageMaker",
                "MetricName": "NoCapacityInvocationFailures",
                "Dimensions": [
                    {
                        "Name": "InferenceComponentName",
                        "Value": unit.base,
                    }
                ],
                "Statistic": "Maximum",
                "Period": 60,
                "EvaluationPeriods": 1,
                "Threshold": 1,
                "ComparisonOperator": "GreaterThanOrEqualToThreshold",
                "TreatMissingData": "notBreaching",
                "AlarmActions": [{"Ref": "WakingPolicy"}],
            },
        },
    }


def _variants(rendering: Rendering, units: list[Unit]) -> dict[str, Any]:
    """An endpoint whose variants divide the traffic by weight; a shadow is a variant that gets
    copies.
    """
    shadow = units[0].model.shadow
    found: dict[str, Any] = {}
    production: list[dict[str, Any]] = []
    shadows: list[dict[str, Any]] = []
    for unit in units:
        suffix = f"V{unit.version}"
        found[f"Model{suffix}"] = {
            "Type": "AWS::SageMaker::Model",
            "Properties": {
                "ExecutionRoleArn": {"Fn::GetAtt": ["Role", "Arn"]},
                "PrimaryContainer": _container(unit),
            },
        }
        is_shadow = shadow is not None and unit.version == shadow.version and unit.weight == 0
        weight = shadow.percent if is_shadow and shadow else unit.weight
        variant = _variant(rendering, unit, suffix, weight)
        (shadows if is_shadow else production).append(variant)
        if not is_shadow:
            found[f"Scaling{suffix}"] = _variant_scaling(unit)
            found[f"ScalingPolicy{suffix}"] = _policy(
                unit, "SageMakerVariantConcurrentRequestsPerModelHighResolution", suffix
            )
    config: dict[str, Any] = {"ProductionVariants": production}
    if shadows:
        config["ShadowProductionVariants"] = shadows
    return {
        **found,
        "Config": {"Type": "AWS::SageMaker::EndpointConfig", "Properties": config},
        "Endpoint": _endpoint(),
    }


def _variant(rendering: Rendering, unit: Unit, suffix: str, weight: int) -> dict[str, Any]:
    instance_type = _instance_type(rendering, unit)
    return {
        "VariantName": f"v{unit.version}",
        "ModelName": {"Fn::GetAtt": [f"Model{suffix}", "ModelName"]},
        "InstanceType": instance_type,
        **_volume(rendering, unit, instance_type, 1),
        "InitialInstanceCount": max(1, unit.min_warm),
        "InitialVariantWeight": weight,
        "ContainerStartupHealthCheckTimeoutInSeconds": START_S,
    }


def _variant_scaling(unit: Unit) -> dict[str, Any]:
    resource = {"Fn::Sub": f"endpoint/${{Endpoint.EndpointName}}/variant/v{unit.version}"}
    scalable = _scalable("variant:DesiredInstanceCount", resource, unit)
    scalable["Properties"]["MinCapacity"] = max(1, unit.min_warm)
    scalable["Properties"]["MaxCapacity"] = max(1, unit.min_warm, unit.max_instances)
    return scalable
