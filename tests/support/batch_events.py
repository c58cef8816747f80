"""Events as AWS's services write them, all of their fields, for the tests of what batch jobs start from."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote_plus

ETAG = "0123456789abcdef0123456789abcdef"


def s3_record(
    bucket: str, key: str, *, etag: str = ETAG, version: str | None = None, name: str = "ObjectCreated:Put"
) -> dict[str, Any]:
    described = {
        "key": quote_plus(key, safe="/"),
        "size": 1024,
        "eTag": etag,
        "sequencer": "0A1B2C3D4E5F678901",
    }
    if version is not None:
        described["versionId"] = version
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-east-1",
        "eventTime": "2026-01-02T03:04:05.678Z",
        "eventName": name,
        "userIdentity": {"principalId": "EXAMPLE"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {"x-amz-request-id": "EXAMPLE123456789", "x-amz-id-2": "EXAMPLE123/5678abc"},
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "on-upload",
            "bucket": {
                "name": bucket,
                "ownerIdentity": {"principalId": "EXAMPLE"},
                "arn": f"arn:aws:s3:::{bucket}",
            },
            "object": described,
        },
    }


def s3_event(bucket: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"Records": [s3_record(bucket, key, **fields)]}


def s3_test_event(bucket: str) -> dict[str, Any]:
    return {
        "Service": "Amazon S3",
        "Event": "s3:TestEvent",
        "Time": "2026-01-02T03:04:05.678Z",
        "Bucket": bucket,
        "RequestId": "5582815E1AEA5ADF",
        "HostId": "8cLeGAmw098X5cv4Zkwcmo8vvZa3eH3eKxsPzbB9wrR",
    }


def object_created(bucket: str, key: str, *, etag: str = ETAG, version: str | None = None) -> dict[str, Any]:
    described = {"key": key, "size": 5, "etag": etag, "sequencer": "00617F08299329D189"}
    if version is not None:
        described["version-id"] = version
    detail = {
        "version": "0",
        "bucket": {"name": bucket},
        "object": described,
        "request-id": "N4N7GDK58NMKJ12R",
        "requester": "123456789012",
        "source-ip-address": "1.2.3.4",
        "reason": "PutObject",
    }
    return eventbridge(detail, source="aws.s3", kind="Object Created")


def eventbridge(
    detail: dict[str, Any], *, source: str = "my.app", kind: str = "Answers wanted"
) -> dict[str, Any]:
    return {
        "version": "0",
        "id": "17793124-05d4-b198-2fde-7ededc63b103",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "time": "2026-01-02T03:04:05Z",
        "region": "us-east-1",
        "resources": [],
        "detail": detail,
    }


def sns_envelope(message: Any) -> dict[str, Any]:
    """A message that SQS gets from a topic without raw delivery."""
    return {
        "Type": "Notification",
        "MessageId": "95df01b4-ee98-5cb9-9903-4c221d41eb5e",
        "TopicArn": "arn:aws:sns:us-east-1:123456789012:uploads",
        "Subject": "Amazon S3 Notification",
        "Message": json.dumps(message),
        "Timestamp": "2026-01-02T03:04:05.678Z",
        "SignatureVersion": "1",
        "Signature": "EXAMPLE",
        "SigningCertURL": "https://sns.us-east-1.amazonaws.com/example.pem",
        "UnsubscribeURL": "https://sns.us-east-1.amazonaws.com/?Action=Unsubscribe",
        "MessageAttributes": {},
    }


def sns_event(message: Any) -> dict[str, Any]:
    """The event that a function gets from a topic."""
    return {
        "Records": [
            {
                "EventSource": "aws:sns",
                "EventVersion": "1.0",
                "EventSubscriptionArn": "arn:aws:sns:us-east-1:123456789012:uploads:21be56ed",
                "Sns": sns_envelope(message),
            }
        ]
    }


def sqs_record(
    body: Any,
    *,
    message_id: str = "059f36b4-87a3-44ab-83d2-661975830a7d",
    queue: str = "jobs",
    group: str = "",
) -> dict[str, Any]:
    attributes = {
        "ApproximateReceiveCount": "1",
        "SentTimestamp": "1545082649183",
        "SenderId": "AIDAIENQZJOLO23YVJ4VO",
        "ApproximateFirstReceiveTimestamp": "1545082649185",
    }
    if group:
        attributes |= {"MessageGroupId": group, "SequenceNumber": "18849496460467696128"}
    return {
        "messageId": message_id,
        "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a",
        "body": body if isinstance(body, str) else json.dumps(body),
        "attributes": attributes,
        "messageAttributes": {},
        "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
        "eventSource": "aws:sqs",
        "eventSourceARN": f"arn:aws:sqs:us-east-1:123456789012:{queue}",
        "awsRegion": "us-east-1",
    }


def sqs_event(*bodies: Any, queue: str = "jobs") -> dict[str, Any]:
    return {
        "Records": [
            sqs_record(body, message_id=f"message-{number}", queue=queue)
            for number, body in enumerate(bodies)
        ]
    }
