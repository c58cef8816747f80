"""Answers to each S3 operation, apart from connections, rates and faults. Signatures are not looked
at.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import formatdate
from itertools import islice
from urllib.parse import quote
from xml.sax.saxutils import escape

from tests.support.store_http import Answer, FileBody, Request, RequestStream
from tests.support.store_objects import Objects, Stored, StoreError

MAX_KEYS = 1000


def answer(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    """Do what the request asks for."""
    try:
        return _operation(request)(objects, request, stream)
    except StoreError as error:
        return error_answer(error.status, error.code, request)


def error_answer(status: int, code: str, request: Request) -> Answer:
    body = (
        f"<Error><Code>{code}</Code><Message>{code} for {escape(request.key or request.bucket)}</Message>"
        f"<Resource>/{escape(request.bucket)}/{escape(request.key)}</Resource><RequestId>{request.serial}</RequestId></Error>"
    )
    return Answer(
        status, {"Content-Type": "application/xml"}, b"" if request.method == "HEAD" else _xml(body)
    )


def _operation(request: Request) -> Callable[[Objects, Request, RequestStream], Answer]:
    match request.method, bool(request.key):
        case "GET", True:
            return get_object
        case "HEAD", True:
            return get_object
        case "GET", False:
            return list_objects
        case "HEAD", False:
            return head_bucket
        case "PUT", False:
            return make_bucket
        case "PUT", True:
            return put_part if "uploadId" in request.query else put_object
        case "POST", True:
            return begin_upload if "uploads" in request.query else finish_upload
        case "DELETE", True:
            return abort_upload if "uploadId" in request.query else delete_object
    raise StoreError(405, "MethodNotAllowed")


def get_object(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    stored = objects.find(request.bucket, request.key)
    wanted = request.headers.get("if-match")
    if wanted not in (None, "*", stored.etag):
        raise StoreError(412, "PreconditionFailed")
    headers = {
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.modified_unix_s, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if request.headers.get("if-none-match") in ("*", stored.etag):
        return Answer(304, headers)
    span = _byte_range(request, stored)
    if span is None:
        return Answer(200, headers, FileBody(str(stored.path), 0, stored.size_bytes))
    start, end = span
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size_bytes}"
    return Answer(206, headers, FileBody(str(stored.path), start, end - start))


def _byte_range(request: Request, stored: Stored) -> tuple[int, int] | None:
    """Half-open; None for the whole object."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not found or not (found[1] or found[2]):
        return None
    if found[1]:
        start = int(found[1])
        end = min(int(found[2]) + 1 if found[2] else stored.size_bytes, stored.size_bytes)
    else:
        start, end = max(0, stored.size_bytes - int(found[2])), stored.size_bytes
    if start >= end:
        raise StoreError(416, "InvalidRange")
    return start, end


def list_objects(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    """ListObjectsV2, without delimiters. The continuation token is the last key given."""
    query = request.query
    prefix, limit = query.get("prefix", ""), min(MAX_KEYS, int(query.get("max-keys", MAX_KEYS)))
    after = query.get("continuation-token") or query.get("start-after", "")
    is_encoded = query.get("encoding-type") == "url"
    encode = quote if is_encoded else escape
    found = (item for item in objects.list(request.bucket, prefix) if item[0] > after)
    page = list(islice(found, limit))
    is_truncated = next(found, None) is not None
    contents = "".join(
        f"<Contents><Key>{encode(key)}</Key><LastModified>{_iso(stored.modified_unix_s)}</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag><Size>{stored.size_bytes}</Size></Contents>"
        for key, stored in page
    )
    token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if is_truncated else ""
    encoding = "<EncodingType>url</EncodingType>" if is_encoded else ""
    body = (
        f"<Name>{request.bucket}</Name><Prefix>{encode(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>{encoding}"
        f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{token}{contents}"
    )
    document = _xml(f"<ListBucketResult>{body}</ListBucketResult>")
    return Answer(200, {"Content-Type": "application/xml"}, document)


def head_bucket(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    next(objects.list(request.bucket, ""), None)
    return Answer(200)


def make_bucket(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    objects.make_bucket(request.bucket)
    return Answer(200)


def put_object(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    stored = objects.put(request.bucket, request.key, stream, allowed=_condition(request))
    return Answer(200, {"ETag": stored.etag})


def delete_object(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    objects.delete(request.bucket, request.key)
    return Answer(204)


def begin_upload(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    upload_id = objects.begin_upload(request.bucket)
    body = (
        f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><UploadId>{upload_id}</UploadId>"
    )
    return Answer(200, {}, _xml(f"<InitiateMultipartUploadResult>{body}</InitiateMultipartUploadResult>"))


def put_part(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    etag = objects.put_part(request.query["uploadId"], int(request.query["partNumber"]), stream)
    return Answer(200, {"ETag": etag})


def finish_upload(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    document = stream.read_all().decode()
    numbers = [int(text) for text in re.findall(r"<PartNumber>(\d+)</PartNumber>", document)]
    etags = [text.replace("&quot;", '"') for text in re.findall(r"<ETag>([^<]*)</ETag>", document)]
    stored = objects.finish_upload(
        request.bucket,
        request.key,
        request.query["uploadId"],
        list(zip(numbers, etags, strict=True)),
        allowed=_condition(request),
    )
    body = f"<Key>{escape(request.key)}</Key><ETag>{escape(stored.etag)}</ETag>"
    return Answer(200, {}, _xml(f"<CompleteMultipartUploadResult>{body}</CompleteMultipartUploadResult>"))


def abort_upload(objects: Objects, request: Request, stream: RequestStream) -> Answer:
    objects.abort_upload(request.query["uploadId"])
    return Answer(204)


def _condition(request: Request) -> Callable[[str | None], bool]:
    """True if the request's conditions allow to replace what has this ETag (None: nothing is there)."""
    if request.headers.get("if-none-match") == "*":
        return lambda present: present is None
    wanted = request.headers.get("if-match")
    return lambda present: wanted is None or present == wanted


def _xml(body: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()


def _iso(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(unix_s))
