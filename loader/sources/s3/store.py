"""An S3 bucket's folder as a store.

Reading signs its own requests and goes over `http/client.py`: neither boto3 nor its import stands
between a cold process and its first byte. A bucket that turns out to be in another region is asked
there; credentials that expired are renewed once. Writing, which is never in a hurry, goes through
boto3 (`uploads.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import SourceError, TeneralError
from .. import base
from ..base import ObjectInfo, SourceOptions, check_name
from ..http.address import encode_path
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request
from ..http.outage import HttpStatistics, Note
from .address import address_of, is_region, parse_url, settings_from
from .credentials import CredentialChain
from .sigv4 import Query, encode_query, sign, signed_region

if TYPE_CHECKING:
    from ..base import Writer
    from ..http.xml import ListPage
    from .uploads import S3Uploads

MAX_PAGE_BYTES = 16 * 1024 * 1024  # a listing's page: 1,000 keys of 1 KiB, escaped
MAX_PAGES = 1_000
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def uses_tls() -> bool:
    """True if a bucket is reached over TLS, as far as the environment shows it; an endpoint of
    one's own may be not.
    """
    return not any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


class S3Store:
    """A `Store` on s3://bucket/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the
        network.
        """
        options = options or SourceOptions()
        self._bucket, self._prefix = parse_url(url)
        self._settings = settings_from(options, os.environ)
        self._options = options
        self._region = self._settings.region
        self._address = address_of(self._bucket, self._region, self._settings)
        self._credentials = CredentialChain(os.environ, profile=options.profile)
        self._client = HttpClient(self, options, ca_file=self._settings.ca_file)
        self._uploads: S3Uploads | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def follows_redirects(self) -> bool:
        return False  # S3's own redirects need a new signature: `refusal` sees to them

    def stat(self, name: str) -> ObjectInfo:
        return self._client.stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        return self._client.read(name, max_bytes=max_bytes)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        return self._client.read_into(name, start, buffer, version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As `Source.list`, a page of 1,000 at a time. A folder without objects is empty, not
        missing.
        """
        folder = f"{self._prefix}/" if self._prefix else ""
        token: str | None = None
        for _ in range(MAX_PAGES):
            query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", folder + prefix)]
            if token is not None:
                query.append(("continuation-token", token))
            page = self._page(query)
            for found in page.objects:
                name = found.key.removeprefix(folder)
                if base.is_name(name):  # else a folder's own marker
                    yield ObjectInfo(name, found.size_bytes, found.etag)
            token = page.next_token
            if token is None:
                return
        raise SourceError(f"{self.url} holds too many objects to be listed", source=self.url)

    def on_outage(self, note: Note) -> None:
        """As `Outage.watch`."""
        self._client.on_outage(note)

    def quiesce(self) -> None:
        """As `Remote.quiesce`. What boto3 keeps for writing sees to itself: it retries dead
        connections and renews credentials.
        """
        self._client.quiesce()
        self._credentials.forget()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            uploads, self._uploads = self._uploads, None
        self._client.close()
        if uploads is not None:
            uploads.close()

    def statistics(self) -> HttpStatistics:
        """Of reading; what boto3 does is not counted."""
        return self._client.statistics()

    def create(self, name: str, *, if_absent: bool = False) -> Writer:
        from .uploads import S3Writer  # as in `_writing`

        check_name(name)
        return S3Writer(self._writing(), name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        check_name(name)
        return self._writing().put(name, data, if_absent=if_absent, if_version=if_version)

    def delete(self, name: str) -> None:
        check_name(name)
        self._writing().delete(name)

    def request(self, name: str, extra: Headers) -> Request:
        """As `ObjectServer.request`."""
        return self._signed(f"/{self._key(name)}", (), extra)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        """As `ObjectServer.refusal`."""
        from ..http.xml import parse_problem
        from .answers import explain  # only on the way to an error

        problem = parse_problem(body)
        region = head.headers.get("x-amz-bucket-region", "") or problem.region
        if is_region(region) and self._goes_elsewhere(request, region):
            return None
        if problem.code in ("ExpiredToken", "TokenRefreshRequired") and self._renews(request):
            return None
        return explain(
            problem.code,
            head.status,
            problem.message,
            source=self.url,
            name=name,
            region=region,
            retry_after_s=head.retry_after_s,
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _page(self, query: Query) -> ListPage:
        from ..http.xml import parse_page  # a cold start lists nothing

        body, _ = self._client.fetch("", lambda: self._signed("", query, ()), max_bytes=MAX_PAGE_BYTES)
        return parse_page(body, where=self.url)

    def _signed(self, key_path: str, query: Query, extra: Headers) -> Request:
        """A GET request as of now: with valid credentials, for the region where the bucket was last
        found.
        """
        with self._lock:
            address, region = self._address, self._region
        path = (address.path + encode_path(key_path)) or "/"
        query_string = encode_query(query)
        headers: Headers = ()
        if not self._options.anonymous:
            headers = sign(
                method="GET",
                host=address.origin.authority,
                path=path,
                query=query_string,
                headers=(("x-amz-request-payer", "requester"),) if self._options.requester_pays else (),
                credentials=self._credentials.get(),
                region=region,
                unix_s=time.time(),
            )
        target = f"{path}?{query_string}" if query_string else path
        return Request("GET", address.origin, target, extra, headers)

    def _goes_elsewhere(self, request: Request, region: str) -> bool:
        """True if the request should be made again because the bucket is in this region."""
        with self._lock:
            if region != self._region:
                self._region = region
                self._address = address_of(self._bucket, region, self._settings)
                return True
            # Another thread may have learnt it since the request was made.
            asked = signed_region(request.private_headers)
            return request.origin != self._address.origin or asked not in (None, region)

    def _renews(self, request: Request) -> bool:
        token = dict(request.private_headers).get("x-amz-security-token")
        return token is not None and self._credentials.renew(token)

    def _writing(self) -> S3Uploads:
        from .uploads import S3Uploads  # boto3 takes 0.3 s to import, and serving never writes

        with self._lock:
            if self._closed:
                raise base.closed(self.url, "")
            if self._uploads is None:
                self._uploads = S3Uploads(
                    self._bucket,
                    self._prefix,
                    region=self._region,
                    settings=self._settings,
                    options=self._options,
                )
            return self._uploads
