"""Summarise an uploaded text: `s3://bucket/notes.txt` gets `notes.txt.summary.txt` in the same
folder.

    teneral invoke teneral.handlers.contrib.examples.summarise_upload:handler --model MODEL --event event.json
    teneral serve MODEL --handler teneral.handlers.contrib.examples.summarise_upload:handler

The event is one of S3, a notification or from EventBridge:

    {"Records": [{"eventName": "ObjectCreated:Put", "s3": {
        "bucket": {"name": "bucket"}, "object": {"key": "notes.txt", "eTag": "9b2cf535f27731c974343645a3985328"}}}]}

The text is streamed: each chunk is summarised, then the summaries are, until one is left. A
repeated event of the same version does nothing; CHUNK_TOKENS and SUMMARY_TOKENS may be set in the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from teneral.handlers.contrib import processing
from teneral.handlers.contrib.processing.objects import (
    DerivedObject,
    ObjectRef,
    created_objects,
    read_text,
    s3_client,
)
from teneral.handlers.function.context import Context
from teneral.loader.errors import ChangedError, NotFoundError

MAX_BYTES = 64 << 20  # of one upload
SUFFIX = ".summary.txt"


def handler(event: Any, context: Context) -> dict[str, Any]:
    """Summarise each new object of the event. Returns the result of each."""
    client = s3_client()
    # Summaries are uploads too: without this it would never end.
    uploads = [ref for ref in created_objects(event) if not ref.key.endswith(SUFFIX)]
    return {"objects": [_summarise(client, ref, context) for ref in uploads]}


def _summarise(client: Any, ref: ObjectRef, context: Context) -> dict[str, str]:
    target = ObjectRef(ref.bucket, ref.key + SUFFIX)
    summary = DerivedObject(client, target, origin=ref.etag or context.request_id)
    if summary.is_done():
        return {"source": ref.url, "summary": target.url, "done": "before"}
    try:
        text = _summary_of(read_text(client, ref, max_bytes=MAX_BYTES), context)
    except (
        ChangedError,
        NotFoundError,
    ) as error:  # the new version, if any, has an event of its own
        context.logger.warning("skipped: %s", error)
        return {"source": ref.url, "done": "skipped"}
    summary.write(text.encode(), content_type="text/plain; charset=utf-8")
    return {"source": ref.url, "summary": target.url, "done": "now"}


def _summary_of(pieces: Any, context: Context) -> str:
    chunk_tokens = int(os.environ.get("CHUNK_TOKENS", "1500"))
    summary_tokens = int(os.environ.get("SUMMARY_TOKENS", "150"))

    def ask(task: str, text: str) -> str:
        messages = [{"role": "user", "content": f"{task}\n\n{text}"}]
        return context.model.generate(messages, max_tokens=summary_tokens, temperature=0).text.strip()

    def together(summaries: Sequence[str]) -> str:
        return ask("Make one summary of these summaries of consecutive parts:", "\n\n".join(summaries))

    parts = processing.chunks(
        context.model, pieces, max_tokens=chunk_tokens, overlap_tokens=chunk_tokens // 20
    )
    return processing.map_reduce(
        (part.text for part in parts),
        each=lambda text: ask("Summarise this text in a few sentences:", text),
        together=together,
        fan_in=max(2, chunk_tokens // summary_tokens),
    )
