"""Embed many texts into a file of vectors, Parquet or JSON lines by the extension of the output.

    teneral invoke teneral.handlers.contrib.examples.embed_batch:handler --model MODEL --event event.json
    teneral serve MODEL --handler teneral.handlers.contrib.examples.embed_batch:handler

An event names an object of JSON lines, each a text or {"id": …, "text": …}, or contains the texts:
    {"input": "s3://bucket/texts.jsonl", "output": "s3://bucket/vectors.parquet"}
    {"input": ["some", "texts"], "output": "s3://bucket/vectors.jsonl"}

Texts of more than `max_tokens` (default 256) are embedded in chunks, and their vectors averaged by
tokens. Input and output are streamed; a repeated event writes nothing again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

from teneral.handlers.contrib import processing
from teneral.handlers.contrib.processing import objects
from teneral.handlers.contrib.processing.objects import (
    CONTENT_TYPES,
    DerivedObject,
    ObjectRef,
    s3_client,
    vector_writer,
)
from teneral.handlers.function.context import Context
from teneral.runtime.errors import RequestError

MAX_BYTES = 1 << 30  # of the input
BATCH = 64  # texts embedded together


def handler(event: Any, context: Context) -> dict[str, Any]:
    """Embed the input. Returns the address of the vectors and their number: None if they existed
    already.
    """
    if not isinstance(event, dict) or not isinstance(max_tokens := event.get("max_tokens", 256), int):
        raise RequestError("the event must be an object, and max_tokens a whole number")
    client, target = s3_client(), ObjectRef.parse(event.get("output"), param="output")
    kind = target.key.rpartition(".")[2]
    if kind not in CONTENT_TYPES:
        raise RequestError("the output's name must end in .parquet or .jsonl", param="output")
    origin, values = _input(client, event.get("input"))
    output = DerivedObject(client, target, origin=f"{origin} {max_tokens} {context.model.name}")
    if output.is_done():
        return {"output": target.url, "count": None}
    with tempfile.TemporaryFile() as file:
        count = _write(file, kind, _items(values), max_tokens, context)
        file.seek(0)
        output.write(file, content_type=CONTENT_TYPES[kind])
    return {"output": target.url, "count": count}


def _input(client: Any, given: Any) -> tuple[str, Iterable[Any]]:
    """The identity of the input version, and its values."""
    if isinstance(given, list):
        return hashlib.blake2b(json.dumps(given).encode(), digest_size=16).hexdigest(), given
    ref = objects.current(client, ObjectRef.parse(given, param="input"))
    return ref.etag, objects.json_lines(objects.read_text(client, ref, max_bytes=MAX_BYTES))


def _items(values: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for number, value in enumerate(values):
        item = value if isinstance(value, dict) else {"text": value}
        if not isinstance(item.get("text"), str):
            raise RequestError(f"item {number} has no text", param="input")
        yield str(item.get("id", number)), item["text"]


def _write(file: IO[bytes], kind: str, items: Iterator[tuple[str, str]], limit: int, context: Context) -> int:
    writer, count = None, 0
    while batch := list(itertools.islice(items, BATCH)):
        vectors = processing.embed_long(context.model, [text for _, text in batch], max_tokens=limit)
        writer = writer or vector_writer(file, kind, num_dimensions=vectors.shape[1])
        writer.write([name for name, _ in batch], vectors)
        count += len(batch)
    if writer is None:
        raise RequestError("there is nothing to embed", param="input")
    writer.finish()
    return count
