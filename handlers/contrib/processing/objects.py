"""Objects in S3 as a handler's input and output, through boto3, with Teneral's errors; and files of embeddings.

Reads are of the version in the event, bounded, and as text in pieces. Each output is written once for each version of
its origin: a repeated event finds it done, and of two concurrent ones, one writes. Embeddings are written as JSON
lines, or Parquet with `pip install 'teneral[parquet]'`: rows are an id and a vector, written batch by batch, so that
memory does not grow with the file. This module knows nothing of models.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from ....loader.errors import AlreadyExistsError, NotFoundError, UnavailableError, UsageError
from ....runtime.errors import RequestError
from ...function.object_events import ObjectRef, created_objects

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DerivedObject", "ObjectRef", "created_objects", "current", "json_lines", "lines_of", "read_bytes", "read_text",
    "s3_client",
]  # fmt: skip

MAX_LINE_CHARS = 1 << 20
PIECE_BYTES = 1 << 16
# Metadata key of an output: the version of its origin.
_ORIGIN = "made-from"
CONTENT_TYPES = {"parquet": "application/vnd.apache.parquet", "jsonl": "application/jsonl"}


def read_bytes(client: Any, ref: ObjectRef, *, max_bytes: int) -> bytes:
    """The object's bytes.

    Raises `RequestError` if it is larger, `ChangedError` if it was replaced meanwhile, and `NotFoundError`.
    """
    with _translated(ref):
        body = _body(client, ref, max_bytes)
        try:
            data: bytes = body.read()
            return data
        finally:
            body.close()


def read_text(client: Any, ref: ObjectRef, *, max_bytes: int) -> Iterator[str]:
    """The object's text (UTF-8) in pieces, none of it kept.

    Raises `RequestError` if it is larger or not text, `ChangedError` if it was replaced meanwhile,
    and `NotFoundError`.
    """
    with _translated(ref):
        body = _body(client, ref, max_bytes)
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            for data in body.iter_chunks(PIECE_BYTES):
                yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise RequestError(f"{ref.url} is not UTF-8 text") from error
        finally:
            body.close()


def _body(client: Any, ref: ObjectRef, max_bytes: int) -> Any:
    """boto3's body of the event's version. Raises `RequestError` if it is larger than `max_bytes`."""
    version = {"VersionId": ref.version_id} if ref.version_id else {}
    condition = {"IfMatch": f'"{ref.etag}"'} if ref.etag else {}
    answer = client.get_object(Bucket=ref.bucket, Key=ref.key, **version, **condition)
    size_bytes = answer["ContentLength"]
    if size_bytes > max_bytes:
        answer["Body"].close()
        raise RequestError(f"{ref.url} has {size_bytes} bytes, more than {max_bytes}")
    return answer["Body"]


def current(client: Any, ref: ObjectRef) -> ObjectRef:
    """The object's current version. Raises `NotFoundError`."""
    with _translated(ref):
        head = client.head_object(Bucket=ref.bucket, Key=ref.key)
    return ObjectRef(ref.bucket, ref.key, head["ETag"].strip('"'), head.get("VersionId", ""))


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text that arrives in pieces, without line ends. Raises `RequestError` for one
    that is too long.
    """
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
        if len(rest) > MAX_LINE_CHARS:
            raise RequestError(f"a line has more than {MAX_LINE_CHARS} characters")
    if rest:
        yield rest


def json_lines(pieces: Iterable[str]) -> Iterator[Any]:
    """The values of JSON lines; empty lines are skipped. Raises `RequestError` naming the first
    invalid line.
    """
    for number, line in enumerate(lines_of(pieces), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"line {number} is not JSON: {error}") from error


class DerivedObject:
    """An object derived from a version of another, named by `origin`: an ETag, or any short text."""

    def __init__(self, client: Any, ref: ObjectRef, *, origin: str) -> None:
        self._client = client
        self._ref = ref
        self._origin = origin[:200].encode("ascii", "backslashreplace").decode()
        self._replaced_etag: str | None = None

    def is_done(self) -> bool:
        """True if it was made from this version; one made from another version will be replaced."""
        try:
            with _translated(self._ref):
                head = self._client.head_object(Bucket=self._ref.bucket, Key=self._ref.key)
        except NotFoundError:
            self._replaced_etag = None
            return False
        self._replaced_etag = head["ETag"]
        return bool(head["Metadata"].get(_ORIGIN) == self._origin)

    def write(self, body: bytes | IO[bytes], *, content_type: str) -> None:
        """Write the object atomically.

        Raises `AlreadyExistsError` if it was written since `is_done`: a repeated invocation then
        finds out whether it is done.
        """
        expected = self._replaced_etag
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        with _translated(self._ref, is_write=True):
            self._client.put_object(
                Bucket=self._ref.bucket,
                Key=self._ref.key,
                Body=body,
                ContentType=content_type,
                Metadata={_ORIGIN: self._origin},
                **condition,
            )


def s3_client() -> Any:
    """boto3's client, with its default settings. Made for each invocation, because its state may be
    stale after a freeze.
    """
    import boto3  # 157 ms that a handler without S3 need not pay

    return boto3.client("s3")


@contextmanager
def _translated(ref: ObjectRef, *, is_write: bool = False) -> Iterator[None]:
    """Translate boto3's errors to the loader's, so that callers know which ones to retry."""
    from botocore.exceptions import BotoCoreError, ClientError

    from ....loader.sources.s3.answers import explain

    try:
        yield
    except ClientError as error:
        response: Any = error.response
        status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
        if is_write and status in (409, 412):
            raise AlreadyExistsError(
                f"{ref.url} was written by another client meanwhile",
                source=f"s3://{ref.bucket}",
                name=ref.key,
            ) from error
        code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
        raise explain(code, status, message, source=f"s3://{ref.bucket}", name=ref.key) from error
    except BotoCoreError as error:
        raise UnavailableError(
            f"{ref.url}: {error}",
            source=f"s3://{ref.bucket}",
            name=ref.key,
            hint="Check the endpoint and the network.",
        ) from error


class VectorWriter(Protocol):
    """Writes to a file that its caller opened and will close."""

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None: ...

    def finish(self) -> None: ...


def vector_writer(file: IO[bytes], kind: str, *, num_dimensions: int) -> VectorWriter:
    """For `kind` "jsonl" or "parquet". Raises `RequestError` for another, `UsageError` without pyarrow."""
    if kind == "jsonl":
        return JsonLinesVectors(file)
    if kind == "parquet":
        return ParquetVectors(file, num_dimensions)
    raise RequestError(f"vectors are written as jsonl or parquet, not as {kind[:20]!r}", param="output")


class JsonLinesVectors:
    """{"id": …, "embedding": […]} in each line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None:
        for name, vector in zip(ids, vectors.tolist(), strict=True):
            self._file.write(json.dumps({"id": name, "embedding": vector}).encode() + b"\n")

    def finish(self) -> None:
        """Do nothing: all lines are written."""


class ParquetVectors:
    """Columns `id` (string) and `embedding` (a list of float32 of fixed size), a row group a batch."""

    def __init__(self, file: IO[bytes], num_dimensions: int) -> None:
        try:
            import pyarrow
            import pyarrow.parquet  # 0.2 s and 170 MB installed: an extra
        except ImportError as error:
            raise UsageError(
                "Parquet needs pyarrow, which is not installed",
                key="parquet",
                hint="pip install 'teneral[parquet]', or write JSON lines.",
            ) from error
        self._arrow: Any = pyarrow
        vector = pyarrow.list_(pyarrow.float32(), num_dimensions)
        self._schema = pyarrow.schema([("id", pyarrow.string()), ("embedding", vector)])
        self._writer: Any = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None:
        arrow = self._arrow
        values = arrow.array(vectors.reshape(-1), type=arrow.float32())
        embeddings = arrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        columns = [arrow.array(list(ids), type=arrow.string()), embeddings]
        self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._schema))

    def finish(self) -> None:
        """Write the footer, without which the file is invalid."""
        self._writer.close()
