"""Classify a picture when it is uploaded to S3, and publish it to SNS when its label asks for an action.

    ALERT_TOPIC_ARN=arn:aws:sns:eu-central-1:123456789012:alerts ALERT_LABELS=smoke,fire \\
    teneral serve s3://models/camera --handler teneral.handlers.contrib.examples.classify_upload:handler

The model is an ONNX image classifier (docs/onnx.md) with one input, (batch, 3, IMAGE_SIZE, IMAGE_SIZE) float32, and one
output, a score for each label of its config.json. The event is what S3 sends, as a notification or through EventBridge.
Its answer has an entry for each new picture; `label` is null where no label is sure enough:

    {"objects": [{"object": "s3://bucket/camera-7.jpg", "label": "smoke", "score": 0.93, "alerted": true}]}

An event that comes again publishes again, with the same idempotency key. IMAGE_SIZE is 224 and THRESHOLD 0.5 unless the
environment has others; pictures are normalised as ImageNet's are. Needs `pip install 'teneral[onnx,images]'`.
"""

from __future__ import annotations

import os
from typing import Any

from teneral.handlers.contrib import processing
from teneral.handlers.contrib.processing.objects import ObjectRef, created_objects, read_bytes, s3_client
from teneral.handlers.function.context import Context
from teneral.loader.errors import ChangedError, NotFoundError

MAX_BYTES = 20 << 20  # of one picture
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
IMAGENET = processing.Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def handler(event: Any, context: Context) -> dict[str, Any]:
    """The label of each new picture of the event, and whether it led to an alert."""
    client = s3_client()
    pictures = [ref for ref in created_objects(event) if ref.key.lower().endswith(SUFFIXES)]
    return {"objects": [_classified(client, ref, context) for ref in pictures]}


def _classified(client: Any, ref: ObjectRef, context: Context) -> dict[str, Any]:
    try:
        data = read_bytes(client, ref, max_bytes=MAX_BYTES)
    except (
        ChangedError,
        NotFoundError,
    ) as error:  # another event tells of the version that there is now, if any
        context.logger.warning("skipped: %s", error)
        return {"object": ref.url, "label": None, "skipped": True}
    size = int(os.environ.get("IMAGE_SIZE", "224"))
    image = processing.resize(processing.decode_image(data), shortest_side=size)
    pixels = processing.to_array(processing.center_crop(image, (size, size)), IMAGENET)
    (scores,) = context.model.run({context.model.inputs()[0].name: pixels[None]}).values()
    prediction = processing.decide(
        processing.softmax(scores[0].tolist()),
        context.model.labels(),
        threshold=float(os.environ.get("THRESHOLD", "0.5")),
    )
    answer = {"object": ref.url, "label": prediction.label, "score": prediction.score}
    alerted = prediction.label in os.environ.get("ALERT_LABELS", "").split(",")
    if alerted:
        key = f"{ref.etag or context.request_id}-{prediction.label}"[:128]
        processing.publish_sns(os.environ["ALERT_TOPIC_ARN"])(answer, key)
    return {**answer, "alerted": alerted}
