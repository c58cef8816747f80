"""ECS on Fargate: a CloudFormation template a model, with a load balancer inside the VPC that holds no requests.

A service there never goes to zero: the balancer answers 503 when no instance is there (E7).
"""

from __future__ import annotations

from typing import Any

from ...handlers.pool.values import Code, Model
from .aws import (
    _ECR,
    log_group,
    log_statement,
    pull_statements,
    role,
    scaling_policy,
    secret_parameters,
    store_statements,
    template,
    template_document,
)
from .documents import SCRATCH_BYTES, RenderedDocument, Rendering
from .limits import END_S, MIB, READ, Unit, check_limits, units_of
from .pods import PORT, whole_seconds

GIB = 1 << 30
# Cores → least, most and step of memory in GiB, as docs.aws.amazon.com/AmazonECS "task CPU and memory" has them.
SIZES = {
    0.25: (0.5, 2, 0.5),
    0.5: (1, 4, 1),
    1: (2, 8, 1),
    2: (4, 16, 1),
    4: (8, 30, 1),
    8: (16, 60, 4),
    16: (32, 120, 8),
}
FREE_DISK_GIB, MAX_DISK_GIB = 20, 200
MAX_IDLE_S = 4000  # of a load balancer's connection
SCRATCH = "scratch"
START_S = 900  # longest load; until then the balancer's verdict does not end a task


def render_model(rendering: Rendering, model: Model) -> list[RenderedDocument]:
    check_limits(rendering, model)
    if model.min_warm == 0:
        raise rendering.error(
            Code.E7,
            model,
            "min_warm",
            "is 0, and on Fargate nothing holds a request while the first instance starts",
            hint="Set min_warm = 1, or render for knative, cloud-run or lambda.",
        )
    units = units_of(rendering, model, sets_drain=True)
    for unit in units:
        _size(rendering, unit)
    base = units[0].base
    resources: dict[str, Any] = {
        "Cluster": {"Type": "AWS::ECS::Cluster", "Properties": {"CapacityProviders": ["FARGATE"]}},
        "Logs": log_group(f"/teneral/fargate/{base}"),
        "ExecutionRole": role("ecs-tasks", _execution_statements(units)),
        "TaskRole": role("ecs-tasks", store_statements(units)),
        **_network(model),
        "Listener": _listener(units),
    }
    for unit in units:
        resources |= _unit_resources(rendering, unit)
    body = template(
        f"Teneral: {model.name} on ECS with Fargate",
        parameters={**_parameters(), **secret_parameters(units)},
        resources=resources,
        outputs={"Url": {"Value": {"Fn::Sub": "http://${Balancer.DNSName}"}}},
    )
    return [template_document(base, body)]


def _size(rendering: Rendering, unit: Unit) -> tuple[str, str]:
    """CPU units and MiB of memory of the smallest task that has at least what the instance asks for."""
    for cores, (least, most, step) in SIZES.items():
        gib = unit.memory_bytes / GIB
        rounded = least + max(0, -((least - gib) // step)) * step
        if cores >= unit.cpu and rounded <= most:
            return str(int(cores * 1024)), str(int(rounded * 1024))
    raise rendering.error(
        Code.E6,
        unit.model,
        "instance.memory",
        f"is {unit.memory_bytes / MIB:,.0f} MiB with {unit.cpu:g} cores; Fargate's largest task has 16 and 120 GiB",
        hint=f"Source: docs.aws.amazon.com/AmazonECS: task CPU and memory, read on {READ}.",
    )


def _parameters() -> dict[str, Any]:
    return {
        "Vpc": {"Type": "AWS::EC2::VPC::Id"},
        "Subnets": {
            "Type": "List<AWS::EC2::Subnet::Id>",
            "Description": "Private ones, in two zones at least",
        },
        "Clients": {
            "Type": "String",
            "Default": "10.0.0.0/8",
            "Description": "Addresses that may send requests",
        },
    }


def _execution_statements(units: list[Unit]) -> list[dict[str, Any]]:
    """Permissions of ECS itself to start a task: pull the image, write logs, read secrets."""
    statements = [log_statement()]
    if image := _ECR.fullmatch(units[0].image):
        statements += pull_statements(image)
    if any(unit.secrets for unit in units):
        statements.append(
            {
                "Effect": "Allow",
                "Action": ["secretsmanager:GetSecretValue"],
                "Resource": [{"Ref": "SecretArn"}],
            }
        )
    return statements


def _network(model: Model) -> dict[str, Any]:
    vpc, inside = {"Ref": "Vpc"}, {"IpProtocol": "tcp", "FromPort": PORT, "ToPort": PORT}
    clients = {"IpProtocol": "tcp", "FromPort": 80, "ToPort": 80, "CidrIp": {"Ref": "Clients"}}
    balancer = {"Fn::GetAtt": ["BalancerGroup", "GroupId"]}
    # An answer that is not a stream sends nothing until it is whole, after it waited for its turn.
    idle_s = min(MAX_IDLE_S, whole_seconds(model.request_timeout_s + model.queue_timeout_s))
    return {
        "BalancerGroup": _group("Clients to the balancer", vpc, clients),
        "TaskGroup": _group("The balancer to tasks", vpc, {**inside, "SourceSecurityGroupId": balancer}),
        "Balancer": {
            "Type": "AWS::ElasticLoadBalancingV2::LoadBalancer",
            "Properties": {
                "Type": "application",
                "Scheme": "internal",
                "Subnets": {"Ref": "Subnets"},
                "SecurityGroups": [balancer],
                "LoadBalancerAttributes": [
                    {"Key": "idle_timeout.timeout_seconds", "Value": str(idle_s)},
                    {"Key": "routing.http.drop_invalid_header_fields.enabled", "Value": "true"},
                ],
            },
        },
    }


def _group(description: str, vpc: dict[str, str], rule: dict[str, Any]) -> dict[str, Any]:
    rules = [{"Description": description, **rule}]
    properties = {"GroupDescription": description, "VpcId": vpc, "SecurityGroupIngress": rules}
    return {"Type": "AWS::EC2::SecurityGroup", "Properties": properties}


def _listener(units: list[Unit]) -> dict[str, Any]:
    groups = [{"TargetGroupArn": {"Ref": f"Targets{_suffix(unit)}"}, "Weight": unit.weight} for unit in units]
    return {
        "Type": "AWS::ElasticLoadBalancingV2::Listener",
        "Properties": {
            "LoadBalancerArn": {"Ref": "Balancer"},
            "Port": 80,
            "Protocol": "HTTP",
            "DefaultActions": [{"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}],
        },
    }


def _suffix(unit: Unit) -> str:
    return "" if unit.version is None else f"V{unit.version}"


def _unit_resources(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    suffix = _suffix(unit)
    return {
        f"Targets{suffix}": _targets(unit),
        f"Task{suffix}": _task(rendering, unit),
        f"Service{suffix}": _service(unit),
        f"Scaling{suffix}": _scalable(unit),
        f"ScalingPolicy{suffix}": _policy(unit),
    }


def _targets(unit: Unit) -> dict[str, Any]:
    return {
        "Type": "AWS::ElasticLoadBalancingV2::TargetGroup",
        "Properties": {
            "VpcId": {"Ref": "Vpc"},
            "TargetType": "ip",
            "Port": PORT,
            "Protocol": "HTTP",
            "HealthCheckPath": unit.model.ready_path,
            "HealthCheckIntervalSeconds": 5,
            "HealthCheckTimeoutSeconds": 4,
            "HealthyThresholdCount": 2,
            "UnhealthyThresholdCount": 2,
            "TargetGroupAttributes": [
                {"Key": "deregistration_delay.timeout_seconds", "Value": str(whole_seconds(unit.drain_s))},
                {"Key": "load_balancing.algorithm.type", "Value": "least_outstanding_requests"},
            ],
        },
    }


def _task(rendering: Rendering, unit: Unit) -> dict[str, Any]:
    cpu, memory = _size(rendering, unit)
    properties: dict[str, Any] = {
        "Family": unit.name,
        "RequiresCompatibilities": ["FARGATE"],
        "NetworkMode": "awsvpc",
        "Cpu": cpu,
        "Memory": memory,
        "ExecutionRoleArn": {"Fn::GetAtt": ["ExecutionRole", "Arn"]},
        "TaskRoleArn": {"Fn::GetAtt": ["TaskRole", "Arn"]},
        "ContainerDefinitions": [_container(unit)],
        "Volumes": [{"Name": SCRATCH}],
    }
    disk_gib = -(-(unit.disk_bytes + SCRATCH_BYTES) // GIB)
    if disk_gib > MAX_DISK_GIB:
        raise rendering.error(
            Code.E6,
            unit.model,
            "serve",
            f"keeps {disk_gib} GiB of files, and a task has at most {MAX_DISK_GIB} GiB",
        )
    if disk_gib > FREE_DISK_GIB:
        properties["EphemeralStorage"] = {"SizeInGiB": disk_gib}
    return {"Type": "AWS::ECS::TaskDefinition", "Properties": properties}


def _container(unit: Unit) -> dict[str, Any]:
    logs = {
        "awslogs-group": {"Ref": "Logs"},
        "awslogs-region": {"Ref": "AWS::Region"},
        "awslogs-stream-prefix": unit.name,
    }
    definition: dict[str, Any] = {
        "Name": "teneral",
        "Image": unit.image,
        "Command": ["serve"],
        "Essential": True,
        "PortMappings": [{"ContainerPort": PORT, "Protocol": "tcp"}],
        "Environment": [{"Name": name, "Value": value} for name, value in unit.environment.items()],
        "StopTimeout": whole_seconds(unit.drain_s) + END_S,
        "LogConfiguration": {"LogDriver": "awslogs", "Options": logs},
        "ReadonlyRootFilesystem": True,
        # In the container; every folder of files is below it (`check_limits`).
        "MountPoints": [{"SourceVolume": SCRATCH, "ContainerPath": "/tmp"}],  # noqa: S108
    }
    if unit.secrets:
        definition["Secrets"] = [
            {"Name": name, "ValueFrom": {"Fn::Sub": f"${{SecretArn}}:{key}::"}}
            for name, key in unit.secrets.items()
        ]
    return definition


def _service(unit: Unit) -> dict[str, Any]:
    suffix = _suffix(unit)
    return {
        "Type": "AWS::ECS::Service",
        "DependsOn": "Listener",
        "Properties": {
            "Cluster": {"Ref": "Cluster"},
            "TaskDefinition": {"Ref": f"Task{suffix}"},
            "LaunchType": "FARGATE",
            "DesiredCount": max(1, unit.min_warm),
            "HealthCheckGracePeriodSeconds": START_S,
            "DeploymentConfiguration": {
                "MinimumHealthyPercent": 100,
                "MaximumPercent": 200,
                "DeploymentCircuitBreaker": {"Enable": True, "Rollback": True},
            },
            "NetworkConfiguration": {
                "AwsvpcConfiguration": {
                    "AssignPublicIp": "DISABLED",
                    "Subnets": {"Ref": "Subnets"},
                    "SecurityGroups": [{"Fn::GetAtt": ["TaskGroup", "GroupId"]}],
                }
            },
            "LoadBalancers": [
                {
                    "ContainerName": "teneral",
                    "ContainerPort": PORT,
                    "TargetGroupArn": {"Ref": f"Targets{suffix}"},
                }
            ],
        },
    }


def _scalable(unit: Unit) -> dict[str, Any]:
    least = max(1, unit.min_warm)
    return {
        "Type": "AWS::ApplicationAutoScaling::ScalableTarget",
        "Properties": {
            "ServiceNamespace": "ecs",
            "ScalableDimension": "ecs:service:DesiredCount",
            "ResourceId": {"Fn::Sub": f"service/${{Cluster}}/${{Service{_suffix(unit)}.Name}}"},
            "MinCapacity": least,
            "MaxCapacity": max(unit.max_instances, least),
        },
    }


def _policy(unit: Unit) -> dict[str, Any]:
    suffix = _suffix(unit)
    label = f"${{Balancer.LoadBalancerFullName}}/${{Targets{suffix}.TargetGroupFullName}}"
    metric = {"PredefinedMetricType": "ALBRequestCountPerTarget", "ResourceLabel": {"Fn::Sub": label}}
    # A minute's requests, if each takes a second.
    return scaling_policy(unit, suffix, metric, unit.model.target_concurrency * 60)
