"""Objects in S3 as what a handler starts from and what it leaves: through boto3, with the project's errors.

What is read is the version that the event tells of, bounded, and as text in pieces. What is written is made once from
each version of its origin: whoever is told of the same version again, finds it done; of two at the same time,
one writes. Nothing is known here of models.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from ....loader.errors import AlreadyExistsError, NotFoundError, UnavailableError
from ....runtime.errors import RequestError
from ...function.s3_events import ObjectRef, created_objects

__all__ = [
    "DerivedObject", "ObjectRef", "created_objects", "current", "json_lines", "lines_of", "read_bytes", "read_text",
    "s3_client",
]  # fmt: skip

MAX_LINE_CHARS = 1 << 20
PIECE_BYTES = 1 << 16
_ORIGIN = "made-from"  # in the metadata of what was written: the version of its origin


def read_bytes(client: Any, ref: ObjectRef, *, max_bytes: int) -> bytes:
    """The object's bytes. Raises `RequestError` when it is larger, `ChangedError` when there is another version by now,
    and `NotFoundError`.
    """
    with _translated(ref):
        body = _body(client, ref, max_bytes)
        try:
            data: bytes = body.read()
            return data
        finally:
            body.close()


def read_text(client: Any, ref: ObjectRef, *, max_bytes: int) -> Iterator[str]:
    """The object's text (UTF-8) in pieces, none of it kept. Raises `RequestError` when it is larger or no text,
    `ChangedError` when there is another version by now, and `NotFoundError`.
    """
    with _translated(ref):
        body = _body(client, ref, max_bytes)
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            for data in body.iter_chunks(PIECE_BYTES):
                yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise RequestError(f"{ref.url} is no text in UTF-8") from error
        finally:
            body.close()


def _body(client: Any, ref: ObjectRef, max_bytes: int) -> Any:
    """boto3's body of the version that the event names. Raises `RequestError` when it is larger."""
    version = {"VersionId": ref.version_id} if ref.version_id else {}
    condition = {"IfMatch": f'"{ref.etag}"'} if ref.etag else {}
    answer = client.get_object(Bucket=ref.bucket, Key=ref.key, **version, **condition)
    size_bytes = answer["ContentLength"]
    if size_bytes > max_bytes:
        answer["Body"].close()
        raise RequestError(f"{ref.url} has {size_bytes} bytes, but {max_bytes} is the most")
    return answer["Body"]


def current(client: Any, ref: ObjectRef) -> ObjectRef:
    """The version that there is now. Raises `NotFoundError`."""
    with _translated(ref):
        head = client.head_object(Bucket=ref.bucket, Key=ref.key)
    return ObjectRef(ref.bucket, ref.key, head["ETag"].strip('"'), head.get("VersionId", ""))


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in pieces, without their ends. Raises `RequestError` for one that is too long."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
        if len(rest) > MAX_LINE_CHARS:
            raise RequestError(f"a line has more than {MAX_LINE_CHARS} characters")
    if rest:
        yield rest


def json_lines(pieces: Iterable[str]) -> Iterator[Any]:
    """The values of JSON lines; empty lines are skipped. Raises `RequestError` naming the line that is none."""
    for number, line in enumerate(lines_of(pieces), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"line {number} is not JSON: {error}") from error


class DerivedObject:
    """An object that is made from a version of another, which is named by `origin`: an ETag, or any short text."""

    def __init__(self, client: Any, ref: ObjectRef, *, origin: str) -> None:
        self._client = client
        self._ref = ref
        self._origin = origin[:200].encode("ascii", "backslashreplace").decode()
        self._replaced_etag: str | None = None

    def is_done(self) -> bool:
        """Whether it has been made from this version; one that was made from another is to be replaced."""
        try:
            with _translated(self._ref):
                head = self._client.head_object(Bucket=self._ref.bucket, Key=self._ref.key)
        except NotFoundError:
            self._replaced_etag = None
            return False
        self._replaced_etag = head["ETag"]
        return bool(head["Metadata"].get(_ORIGIN) == self._origin)

    def write(self, body: bytes | IO[bytes], *, content_type: str) -> None:
        """All or nothing. Raises `AlreadyExistsError` when somebody has written it since `is_done`: being invoked again
        finds out whether there is anything left to do.
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
    """boto3's, by its own rules. Made for each invocation: what it knows may be old after a freeze."""
    import boto3  # 157 ms, which a handler without S3 need not pay

    return boto3.client("s3")


@contextmanager
def _translated(ref: ObjectRef, *, is_write: bool = False) -> Iterator[None]:
    """boto3's errors as the loader's, so that who retries knows what is worth it."""
    from botocore.exceptions import BotoCoreError, ClientError

    from ....loader.sources.s3.answers import explain

    try:
        yield
    except ClientError as error:
        said: Any = error.response
        status = int(said["ResponseMetadata"].get("HTTPStatusCode", 0))
        if is_write and status in (409, 412):
            raise AlreadyExistsError(
                f"{ref.url} was written by somebody else meanwhile", source=f"s3://{ref.bucket}", name=ref.key
            ) from error
        code, message = said["Error"].get("Code", ""), said["Error"].get("Message", "")
        raise explain(code, status, message, source=f"s3://{ref.bucket}", name=ref.key) from error
    except BotoCoreError as error:
        raise UnavailableError(
            f"{ref.url}: {error}",
            source=f"s3://{ref.bucket}",
            name=ref.key,
            hint="Check the endpoint and the network.",
        ) from error
