"""An S3 bucket's folder as a store.

Reading signs its own requests and goes over `http/client.py`: neither boto3 nor its import stands
between a cold process and its first byte. A bucket that turns out to be in another region is asked
there; credentials that expired are renewed once; a wrong clock of this machine is corrected once, by
the store's. Writing, which is never in a hurry, goes through boto3 (`uploads.py`), which does the
same.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ...errors import TeneralError
from ..base import SourceOptions
from ..http.address import encode_path
from ..http.bucket import BucketStore, ListingPage
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request, parse_date
from .address import address_of, is_region, parse_url, settings_from
from .credentials import CredentialChain
from .sigv4 import Query, encode_query, sign, signed_region, signed_unix_s

if TYPE_CHECKING:
    from .uploads import S3Uploads

MAX_CLOCK_SKEW_S = 900  # that stores forgive
MAX_PAGE_BYTES = 16 * 1024 * 1024  # a listing's page: 1,000 keys of 1 KiB, escaped
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def uses_tls() -> bool:
    """True if a bucket is reached over TLS, as far as the environment shows it; an endpoint of
    one's own may be not.
    """
    return not any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


class S3Store(BucketStore):
    """A `Store` on s3://bucket/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the
        network.
        """
        options = options or SourceOptions()
        self._bucket, prefix = parse_url(url)
        super().__init__(prefix)
        self._settings = settings_from(options, os.environ)
        self._options = options
        self._region = self._settings.region
        self._address = address_of(self._bucket, self._region, self._settings)
        self._ahead_s: float | None = None  # the store's clock, once this machine's was wrong
        self._credentials = CredentialChain(os.environ, profile=options.profile)
        self._client = HttpClient(self, options, ca_file=self._settings.ca_file)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def request(self, name: str, extra: Headers) -> Request:
        return self._signed(f"/{self._key(name)}", (), extra)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        from ..http.xml import parse_problem
        from .answers import explain  # only on the way to an error

        problem = parse_problem(body)
        region = head.headers.get("x-amz-bucket-region", "") or problem.region
        if is_region(region) and self._goes_elsewhere(request, region):
            return None
        if problem.code in ("ExpiredToken", "TokenRefreshRequired") and self._renews(request):
            return None
        if problem.code == "RequestTimeTooSkewed" and self._sets_clock(request, head):
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

    def _page(self, prefix: str, token: str | None) -> ListingPage:
        from ..http.xml import parse_page  # a cold start lists nothing

        query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", prefix)]
        if token is not None:
            query.append(("continuation-token", token))
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
                unix_s=time.time() + (self._ahead_s or 0.0),
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

    def _sets_clock(self, request: Request, head: Head) -> bool:
        """True if the request should be signed again, by the store's clock. The clock is corrected once,
        or a store that refuses its own time would cause retries without end.
        """
        import logging  # only after a refusal

        now_unix_s = parse_date(head.headers.get("date", ""))
        if now_unix_s is None:
            return False
        with self._lock:
            if self._ahead_s is None:
                self._ahead_s = now_unix_s - time.time()
                logging.getLogger(__name__).warning(
                    "this machine's clock is %.0f s %s that of %s: requests are signed by the store's",
                    abs(self._ahead_s),
                    "behind" if self._ahead_s > 0 else "ahead of",
                    self.url,
                )
                return True
            # Another thread may have corrected it since the request was signed.
            asked_unix_s = signed_unix_s(request.private_headers)
        return asked_unix_s is not None and abs(asked_unix_s - now_unix_s) > MAX_CLOCK_SKEW_S

    def _open_uploads(self) -> S3Uploads:
        from .uploads import S3Uploads  # boto3 takes 0.3 s to import

        return S3Uploads(
            self._bucket,
            self._prefix,
            region=self._region,
            settings=self._settings,
            options=self._options,
        )

    def _forget_credentials(self) -> None:
        # boto3, which writes, retries dead connections and renews credentials itself.
        self._credentials.forget()
