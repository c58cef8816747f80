"""Events of new objects as Google's and Microsoft's services send them, all of their fields, for batch jobs' tests."""

from __future__ import annotations

import base64
import json
from typing import Any

GENERATION = "1712345678901234"
ETAG = "0x8D4BCC2E4835CD0"


def storage_object(bucket: str, key: str, generation: str = GENERATION) -> dict[str, Any]:
    """An object as the JSON API describes it."""
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{key}/{generation}",
        "name": key,
        "bucket": bucket,
        "generation": generation,
        "metageneration": "1",
        "contentType": "application/jsonl",
        "timeCreated": "2026-01-02T03:04:05.678Z",
        "updated": "2026-01-02T03:04:05.678Z",
        "storageClass": "STANDARD",
        "size": "352",
        "md5Hash": "TPmaCjp5uh1jxIQahhPAsQ==",
        "etag": "CMilyqz/+vUCEAE=",
    }


def eventarc(
    bucket: str, key: str, *, generation: str = GENERATION, kind: str = "finalized"
) -> dict[str, Any]:
    """A CloudEvent, in its JSON form."""
    return {
        "specversion": "1.0",
        "id": "4579463231427113",
        "source": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "type": f"google.cloud.storage.object.v1.{kind}",
        "subject": f"objects/{key}",
        "time": "2026-01-02T03:04:05.678Z",
        "datacontenttype": "application/json",
        "bucket": bucket,
        "data": storage_object(bucket, key, generation),
    }


def gs_notification(
    bucket: str,
    key: str,
    *,
    generation: str = GENERATION,
    kind: str = "OBJECT_FINALIZE",
    payload: str = "JSON_API_V1",
) -> dict[str, Any]:
    """The Pub/Sub push of a bucket's notification."""
    message = pubsub(storage_object(bucket, key, generation) if payload != "NONE" else None)
    message["message"]["attributes"] = {
        "notificationConfig": f"projects/_/buckets/{bucket}/notificationConfigs/1",
        "eventType": kind,
        "payloadFormat": payload,
        "bucketId": bucket,
        "objectId": key,
        "objectGeneration": generation,
        "eventTime": "2026-01-02T03:04:05.678901Z",
    }
    return message


def pubsub(data: Any) -> dict[str, Any]:
    """The Pub/Sub push of a message with this value as its data."""
    message: dict[str, Any] = {"messageId": "2070443601311540", "publishTime": "2026-01-02T03:04:05.678Z"}
    if data is not None:
        message["data"] = base64.b64encode(json.dumps(data).encode()).decode()
    return {"message": message, "subscription": "projects/p/subscriptions/uploads"}


def pubsub_event(pushed: dict[str, Any]) -> dict[str, Any]:
    """The same message as Eventarc's CloudEvent."""
    return {
        "specversion": "1.0",
        "id": "2070443601311540",
        "source": "//pubsub.googleapis.com/projects/p/topics/uploads",
        "type": "google.cloud.pubsub.topic.v1.messagePublished",
        "datacontenttype": "application/json",
        "data": pushed,
    }


def _storage_account(account: str) -> str:
    return f"/subscriptions/0a1b/resourceGroups/rg/providers/Microsoft.Storage/storageAccounts/{account}"


def _blob_data(account: str, container: str, key: str, etag: str, api: str) -> dict[str, Any]:
    return {
        "api": api,
        "clientRequestId": "4c5dd7fb-2c48-4a27-bb30-5361b5de920a",
        "requestId": "9aeb0fdf-c01e-0131-0922-9eb549000000",
        "eTag": etag,
        "contentType": "application/jsonl",
        "contentLength": 524288,
        "blobType": "BlockBlob",
        "url": f"https://{account}.blob.core.windows.net/{container}/{key}",
        "sequencer": "00000000000004420000000000028963",
        "storageDiagnostics": {"batchId": "b68529f3-68cd-4744-baa4-3c0498ec19f0"},
    }


def blob_created(
    account: str,
    container: str,
    key: str,
    *,
    etag: str = ETAG,
    api: str = "PutBlockList",
    kind: str = "Microsoft.Storage.BlobCreated",
) -> dict[str, Any]:
    """A CloudEvent of Event Grid."""
    return {
        "specversion": "1.0",
        "source": _storage_account(account),
        "subject": f"/blobServices/default/containers/{container}/blobs/{key}",
        "type": kind,
        "time": "2026-01-02T03:04:05.678901Z",
        "id": "9aeb0fdf-c01e-0131-0922-9eb54906e209",
        "data": _blob_data(account, container, key, etag, api),
    }


def grid_event(
    account: str,
    container: str,
    key: str,
    *,
    etag: str = ETAG,
    api: str = "PutBlob",
    kind: str = "Microsoft.Storage.BlobCreated",
) -> dict[str, Any]:
    """The same in Event Grid's own schema, of which a delivery is a list."""
    return {
        "topic": _storage_account(account),
        "subject": f"/blobServices/default/containers/{container}/blobs/{key}",
        "eventType": kind,
        "eventTime": "2026-01-02T03:04:05.678901Z",
        "id": "9aeb0fdf-c01e-0131-0922-9eb54906e209",
        "data": _blob_data(account, container, key, etag, api),
        "dataVersion": "",
        "metadataVersion": "1",
    }


def grid_validation(code: str = "512d38b6-c7b8-40c8-89fe-f46f9e9622b6") -> list[dict[str, Any]]:
    """Event Grid's validation handshake of a new subscription."""
    event = grid_event("teneralaccount", "c", "k", kind="Microsoft.EventGrid.SubscriptionValidationEvent")
    return [
        event | {"subject": "", "data": {"validationCode": code, "validationUrl": "https://example.com/x"}}
    ]
