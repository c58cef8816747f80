"""Writes to S3 through boto3: puts, multipart uploads and deletions, with errors translated.

An object of unknown length is a multipart upload, or a single put while it is small. Importing this
module does not import boto3; making an `S3Uploads` does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ...errors import AccessDeniedError, SourceError, UnavailableError
from ..base import ObjectInfo, PartWriter, SourceOptions, lost
from ..http.connections import trusted_certificates
from ..http.retry import pause_s
from .address import S3Settings
from .answers import CONFLICTS, explain
from .credentials import WAYS_TO_GIVE

MAX_THREADS = 8  # that send parts, over all objects being written
# A store may be silent for long while it puts the parts of an upload together.
MIN_READ_TIMEOUT_S = 60.0
MAX_CONFLICTS = 8  # of one put with others to the same object: some ten seconds

T = TypeVar("T")


class S3Uploads:
    """Thread-safe. Names are relative to the prefix."""

    def __init__(
        self, bucket: str, prefix: str, *, region: str, settings: S3Settings, options: SourceOptions
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = prefix
        self._client = _make_client(region, settings, options)
        self._common = {"RequestPayer": "requester"} if options.requester_pays else {}
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="s3-upload")

    def create(self, name: str, *, if_absent: bool) -> S3Writer:
        return S3Writer(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """One request, atomic. Raises `AlreadyExistsError` where a condition does not hold."""
        condition: dict[str, str] = {}
        if if_absent:
            condition["IfNoneMatch"] = "*"
        if if_version is not None:
            condition["IfMatch"] = if_version
        with self._translated(name, is_conditional=bool(condition)):
            answer = self._after_conflicts(
                lambda: self._client.put_object(Body=data, **self._address(name), **condition)
            )
        return ObjectInfo(name, len(data), answer["ETag"])

    def delete(self, name: str) -> None:
        with self._translated(name):
            self._after_conflicts(lambda: self._client.delete_object(**self._address(name)))

    def begin(self, name: str) -> str:
        """The new multipart upload's id."""
        with self._translated(name):
            answer = self._client.create_multipart_upload(**self._address(name))
        return str(answer["UploadId"])

    def send_part(self, name: str, upload_id: str, number: int, data: bytes) -> Future[str]:
        """Begin to send a part, counted from 1; its ETag in the end."""

        def send() -> str:
            with self._translated(name):
                answer = self._client.upload_part(
                    Body=data, UploadId=upload_id, PartNumber=number, **self._address(name)
                )
            return str(answer["ETag"])

        return self._threads.submit(send)

    def finish(self, name: str, upload_id: str, etags: list[str], *, if_absent: bool = False) -> str:
        """Make the object of the parts with these ETags, in order; its ETag. Raises
        `AlreadyExistsError` where there is one and `if_absent`, and `UnavailableError` for a
        conflict with another write: the parts must be sent anew then.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        with self._translated(name, is_conditional=if_absent):
            answer = self._client.complete_multipart_upload(
                UploadId=upload_id, MultipartUpload={"Parts": parts}, **self._address(name), **condition
            )
        return str(answer["ETag"])

    def abort(self, name: str, upload_id: str) -> None:
        """Remove the parts of an unfinished upload."""
        with self._translated(name):
            self._client.abort_multipart_upload(UploadId=upload_id, **self._address(name))

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _after_conflicts(self, send: Callable[[], T]) -> T:
        """The result of `send`, which is repeated where another request to the same object was
        under way.
        """
        from botocore.exceptions import ClientError

        for failed in range(1, MAX_CONFLICTS):
            try:
                return send()
            except ClientError as error:
                if error.response["Error"].get("Code", "") not in CONFLICTS or self._closing.is_set():
                    raise
            self._closing.wait(pause_s(failed, None))
        return send()

    def _address(self, name: str) -> dict[str, str]:
        key = f"{self._prefix}/{name}" if self._prefix else name
        return {"Bucket": self._bucket, "Key": key, **self._common}

    @contextmanager
    def _translated(self, name: str, *, is_conditional: bool = False) -> Iterator[None]:
        """Translates boto3's errors into the loader's."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        try:
            yield
        except ClientError as error:
            response: Any = error.response
            status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
            code, message = response["Error"].get("Code", ""), response["Error"].get("Message", "")
            if is_conditional and (status == 412 or code == "NoSuchKey"):
                raise lost(self.url, name) from error
            region = response["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            raise explain(code, status, message, source=self.url, name=name, region=region) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise AccessDeniedError(
                "there are no credentials for S3", source=self.url, name=name, hint=WAYS_TO_GIVE
            ) from error
        except BotoCoreError as error:
            hint = "Check the endpoint and the network."
            message = f"{name} could not be written to {self.url}: {error}"
            raise UnavailableError(message, source=self.url, name=name, hint=hint) from error


def _make_client(region: str, settings: S3Settings, options: SourceOptions) -> Any:
    import boto3  # 0.3 s, see the module's docstring
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    # As `address_of` has it.
    is_path = settings.endpoint_url is not None and settings.addressing_style == "auto"
    style: Any = {"addressing_style": "path" if is_path else settings.addressing_style}
    config = Config(
        s3=style,
        connect_timeout=options.connect_timeout_s,
        read_timeout=max(MIN_READ_TIMEOUT_S, options.read_timeout_s),
        retries={"mode": "standard", "total_max_attempts": max(1, options.max_attempts)},
        max_pool_connections=MAX_THREADS + 2,
        # Not every store that speaks S3 knows the checksums that boto3 adds by default; Amazon's
        # does.
        request_checksum_calculation="when_required" if settings.endpoint_url else "when_supported",
        response_checksum_validation="when_required",
        signature_version=UNSIGNED if options.anonymous else "s3v4",
    )
    try:
        session = boto3.session.Session(profile_name=settings.profile, region_name=region)
        # As for reading; boto3 knows AWS_CA_BUNDLE alone, and finds proxies itself.
        verify = trusted_certificates(settings.ca_file)
        return session.client("s3", endpoint_url=settings.endpoint_url, config=config, verify=verify)
    except BotoCoreError as error:
        raise AccessDeniedError(f"S3 cannot be written to: {error}", hint=WAYS_TO_GIVE) from error


PART_BYTES = 8 * 1024 * 1024  # S3 takes 10,000 parts, so this reaches to 80 GB
# Parts of one object being sent: with the pending one, the memory that a writer takes.
MAX_IN_FLIGHT = 4


class S3Writer(PartWriter):
    """An `ObjectWriter`. Holds at most `MAX_IN_FLIGHT + 1` parts in memory; `write` waits for them
    to go.
    """

    def __init__(self, uploads: S3Uploads, name: str, *, if_absent: bool = False) -> None:
        super().__init__(PART_BYTES)
        self._if_absent = if_absent
        self._uploads = uploads
        self._name = name
        self._upload_id: str | None = None
        self._in_flight: deque[Future[str]] = deque()
        self._etags: list[str] = []

    def _finish(self) -> ObjectInfo:
        if self._upload_id is None:
            return self._uploads.put(self._name, bytes(self._pending), if_absent=self._if_absent)
        if self._pending:
            self._send_pending()
        while self._in_flight:
            self._etags.append(self._in_flight.popleft().result())
        etag = self._uploads.finish(self._name, self._upload_id, self._etags, if_absent=self._if_absent)
        return ObjectInfo(self._name, self._num_bytes, etag)

    def _discard(self) -> None:
        for part in self._in_flight:
            part.cancel()
        wait(self._in_flight)  # a part that arrives after the abort would stay, and be paid for
        self._pending = bytearray()
        if self._upload_id is not None:
            with suppress(
                SourceError
            ):  # the error that led here is the one to show; a lifecycle rule tidies up
                self._uploads.abort(self._name, self._upload_id)

    def _send_part(self, data: bytes) -> None:
        if self._upload_id is None:
            self._upload_id = self._uploads.begin(self._name)
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._etags.append(self._in_flight.popleft().result())
        number = len(self._etags) + len(self._in_flight) + 1
        self._in_flight.append(self._uploads.send_part(self._name, self._upload_id, number, data))
