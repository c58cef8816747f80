"""The parts that AWS's templates share: the least rights on buckets, images, logs and secrets, as policies."""

from __future__ import annotations

import re
from typing import Any

from ...handlers.pool.values import Code, Model
from .documents import RenderedDocument, Rendering
from .limits import Unit
from .pods import whole_seconds

POLICY_VERSION = "2012-10-17"
TEMPLATE_VERSION = "2010-09-09"
LOG_DAYS = 30
_ECR = re.compile(
    r"(?P<account>[0-9]{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[a-z0-9][a-z0-9._/-]{0,255})(?::(?P<tag>[A-Za-z0-9_.-]{1,128}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_READ = ["s3:GetObject"]
# Multipart uploads with conditional writes, the reading of what is there, and the removal of what was begun.
_WRITE = [
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:ListMultipartUploadParts",
    "s3:PutObject",
]


def check_image(rendering: Rendering, unit: Unit) -> re.Match[str]:
    """The image's account, region and repository. Raises E6: these platforms start images of AWS's registry only."""
    match = _ECR.fullmatch(unit.image)
    if match is None:
        raise rendering.error(
            Code.E6,
            unit.model,
            "instance.image",
            f"is {unit.image}; {rendering.platform} takes images of Amazon ECR only",
            hint="Push it there: 123456789012.dkr.ecr.REGION.amazonaws.com/teneral@sha256:….",
        )
    return match


def image_of_ecr(image: str) -> tuple[str, str, str, str] | None:
    """Account, region, repository and ECR's identifier of an image; None for one of another registry."""
    match = _ECR.fullmatch(image)
    if match is None:
        return None
    digest, tag = match["digest"], match["tag"] or "latest"
    found = f"imageDigest={digest}" if digest else f"imageTag={tag}"
    return match["account"], match["region"], match["repository"], found


def template(
    description: str, *, parameters: dict[str, Any], resources: dict[str, Any], outputs: dict[str, Any]
) -> dict[str, Any]:
    body: dict[str, Any] = {"AWSTemplateFormatVersion": TEMPLATE_VERSION, "Description": description}
    if parameters:
        body["Parameters"] = parameters
    return {**body, "Resources": resources, "Outputs": outputs}


def template_document(base: str, body: dict[str, Any]) -> RenderedDocument:
    return RenderedDocument("Template", base, body, f"{base}.template.yaml")


def role(service: str, statements: list[dict[str, Any]], *, condition: bool = True) -> dict[str, Any]:
    """A role that only this service may take, for this account, with these statements."""
    trust: dict[str, Any] = {
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    if condition:
        trust["Condition"] = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    properties: dict[str, Any] = {
        "AssumeRolePolicyDocument": {"Version": POLICY_VERSION, "Statement": [trust]},
    }
    if statements:
        properties["Policies"] = [
            {"PolicyName": "teneral", "PolicyDocument": {"Version": POLICY_VERSION, "Statement": statements}}
        ]
    return {"Type": "AWS::IAM::Role", "Properties": properties}


def store_statements(units: list[Unit]) -> list[dict[str, Any]]:
    """Reading the models and their adapters, and what their settings let them write. A model that is not pinned may be
    a folder of plain safetensors, which must be listed as well, so that what is not there is not denied; addresses
    outside of S3 need no statement.
    """
    read, listed, written = [], [], []
    for unit in units:
        for address, pinned in _read_addresses(unit):
            read.append(_arn(f"{address}/*"))
            if not pinned:
                listed.append(f"{address}/*")
        adapters = _adapter_patterns(unit.model)
        read += [_arn(pattern) for pattern in adapters]
        listed += adapters
        written += [
            _arn(pattern) for pattern in _snapshot_patterns(unit.model) + _answer_patterns(unit.model)
        ]
        listed += _answer_patterns(unit.model)  # a job lists the parts that are done
    statements = []
    if read:
        statements.append(_allow(_READ, _unique(read)))
    for pattern in _unique(listed):
        bucket, _, prefix = pattern.partition("/")
        condition = {"Condition": {"StringLike": {"s3:prefix": prefix}}}
        statements.append({**_allow(["s3:ListBucket"], [_arn(bucket)]), **condition})
    if written:
        statements.append(_allow(_WRITE, _unique(written)))
    return statements


def _read_addresses(unit: Unit) -> list[tuple[str, bool]]:
    found = []
    snapshot = str(unit.model.serve.get("kv_snapshot") or "")
    for address in (unit.address, unit.model.base or "", snapshot):
        if address.startswith("s3://"):
            plain, mark, _ = address.removeprefix("s3://").partition("@b3:")
            is_snapshot = address is snapshot
            found.append((plain.partition("?")[0].rstrip("/"), bool(mark) or is_snapshot))
    return found


def _adapter_patterns(model: Model) -> list[str]:
    """Bucket and keys of adapters, up to their template's gap."""
    address = str(model.serve.get("adapters") or "")
    return [f"{address.removeprefix('s3://').partition('{')[0]}*"] if address.startswith("s3://") else []


def _snapshot_patterns(model: Model) -> list[str]:
    """Bucket and keys of the KV snapshot, where instances save it."""
    snapshot = str(model.serve.get("kv_snapshot") or "")
    if snapshot.startswith("s3://") and "@b3:" not in snapshot and model.serve.get("kv_snapshot_save", True):
        return [f"{snapshot.removeprefix('s3://').rstrip('/')}/*"]
    return []


def _answer_patterns(model: Model) -> list[str]:
    """Buckets and keys of batch jobs' answers, up to their templates' first gap."""
    patterns = []
    for name in ("batch_output", "batch_answers"):
        address = str(model.serve.get(name) or "")
        if address.startswith("s3://"):
            patterns.append(f"{address.removeprefix('s3://').partition('{')[0]}*")
    return patterns


def log_statement() -> dict[str, Any]:
    return _allow(["logs:CreateLogStream", "logs:PutLogEvents"], [{"Fn::Sub": "${Logs.Arn}"}])


def pull_statements(image: re.Match[str]) -> list[dict[str, Any]]:
    """Pulling one repository's images. The token is for the whole registry: AWS knows no narrower one."""
    repository = (
        f"arn:${{AWS::Partition}}:ecr:{image['region']}:{image['account']}:repository/{image['repository']}"
    )
    actions = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    return [_allow(actions, [{"Fn::Sub": repository}]), _allow(["ecr:GetAuthorizationToken"], ["*"])]


def secret_parameters(units: list[Unit]) -> dict[str, Any]:
    """The one secret that holds the values of all secret settings, as JSON, by the names that the file gives."""
    if not any(unit.secrets for unit in units):
        return {}
    keys = ", ".join(sorted({key for unit in units for key in unit.secrets.values()}))
    pattern = "^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+$"
    return {
        "SecretArn": {
            "Type": "String",
            "AllowedPattern": pattern,
            "Description": f"Secret with the keys {keys}",
        }
    }


def environment(unit: Unit) -> dict[str, Any]:
    """Variables; a secret one is resolved by CloudFormation when the stack is deployed."""
    secrets = {
        name: {"Fn::Sub": f"{{{{resolve:secretsmanager:${{SecretArn}}:SecretString:{key}}}}}"}
        for name, key in unit.secrets.items()
    }
    return {**unit.environment, **secrets}


def log_group(name: str) -> dict[str, Any]:
    return {"Type": "AWS::Logs::LogGroup", "Properties": {"LogGroupName": name, "RetentionInDays": LOG_DAYS}}


def _allow(actions: list[str], resources: list[Any]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resources}


def _arn(pattern: str) -> dict[str, str]:
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:s3:::{pattern}"}


def _unique(values: list[Any]) -> list[Any]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def scaling_policy(unit: Unit, suffix: str, metric: dict[str, Any], target: float) -> dict[str, Any]:
    """A policy that keeps a predefined metric at its target, for the resource `Scaling` + suffix."""
    return {
        "Type": "AWS::ApplicationAutoScaling::ScalingPolicy",
        "Properties": {
            "PolicyName": f"{unit.name}-requests",
            "PolicyType": "TargetTrackingScaling",
            "ScalingTargetId": {"Ref": f"Scaling{suffix}"},
            "TargetTrackingScalingPolicyConfiguration": {
                "PredefinedMetricSpecification": metric,
                "TargetValue": target,
                "ScaleInCooldown": whole_seconds(unit.model.idle_timeout_s),
                "ScaleOutCooldown": 0,
            },
        },
    }
