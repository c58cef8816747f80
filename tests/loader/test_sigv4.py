"""Our signature of S3 requests is botocore's, byte for byte."""

from __future__ import annotations

import datetime
import hmac
import subprocess
import sys
from urllib.parse import parse_qsl, urlsplit

import botocore.auth
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.load import patience_s

from teneral.loader.sources.http.address import encode_path
from teneral.loader.sources.s3.sigv4 import Credentials, encode_query, hmac_sha256, sign, signed_region

NOW = datetime.datetime(2026, 3, 1, 4, 5, 6, tzinfo=datetime.UTC)
KEYS = [
    "model.safetensors",
    "a b+c/d=e&f?g#h.bin",
    "ü-名-🦋/x",
    "//double//slashes/./and/../dots",
    "percent%20%2F%",
    "quotes'\"()*!~$@,;:",
    "tab\tnewline",
]


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda remove_tzinfo=True: NOW.replace(tzinfo=None)
    )


def boto_headers(
    path: str, query: str, headers: dict[str, str], credentials: Credentials, region: str
) -> dict[str, str]:
    url = f"https://bucket.s3.example.com{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method="GET", url=url, headers=headers)
    request.context["payload_signing_enabled"] = True
    boto = BotoCredentials(
        credentials.access_key_id, credentials.secret_access_key, credentials.session_token
    )
    S3SigV4Auth(boto, "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


def our_headers(
    path: str, query: str, headers: dict[str, str], credentials: Credentials, region: str
) -> dict[str, str]:
    signed = sign(
        method="GET",
        host="bucket.s3.example.com",
        path=path,
        query=query,
        headers=tuple(headers.items()),
        credentials=credentials,
        region=region,
        unix_s=NOW.timestamp(),
    )
    return {name.lower(): value for name, value in signed}


LONG_LIVED = Credentials("AKIAEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCY")
SESSION = Credentials("ASIAEXAMPLE", "secret", "token/with+signs==")


@pytest.mark.parametrize("credentials", [LONG_LIVED, SESSION], ids=["long-lived", "session"])
@pytest.mark.parametrize("key", KEYS)
def test_objects_are_signed_as_botocore_does(key: str, credentials: Credentials) -> None:
    path = encode_path(f"/{key}")
    assert our_headers(path, "", {}, credentials, "eu-central-1") == boto_headers(
        path, "", {}, credentials, "eu-central-1"
    )


def test_a_requester_who_pays_signs_that() -> None:
    headers = {"x-amz-request-payer": "requester"}
    ours = our_headers("/key", "", headers, SESSION, "us-east-1")
    assert ours == boto_headers("/key", "", headers, SESSION, "us-east-1")
    assert "x-amz-request-payer" in ours["authorization"]


def test_a_listing_is_signed_as_botocore_does() -> None:
    query = encode_query(
        [("list-type", "2"), ("prefix", "a b/ü+&="), ("continuation-token", "x/y=="), ("delimiter", "")]
    )
    assert our_headers("/", query, {}, LONG_LIVED, "cn-north-1") == boto_headers(
        "/", query, {}, LONG_LIVED, "cn-north-1"
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(deadline=None)
@given(
    key=TEXT.filter(bool),
    query=st.lists(st.tuples(TEXT.filter(bool), TEXT), max_size=4, unique_by=lambda pair: pair[0]),
    token=st.none() | st.text("abcXYZ0189+/=", min_size=1, max_size=60),
    region=st.sampled_from(["us-east-1", "eu-west-3", "ap-southeast-2"]),
)
def test_any_key_and_query_is_signed_as_botocore_does(
    key: str, query: list[tuple[str, str]], token: str | None, region: str
) -> None:
    credentials = Credentials("AKIA", "s3cr3t", token)
    path, query_string = encode_path(f"/{key}"), encode_query(query)
    assert our_headers(path, query_string, {}, credentials, region) == boto_headers(
        path, query_string, {}, credentials, region
    )


@settings(deadline=None)
@given(key=TEXT, query=st.dictionaries(TEXT.filter(bool), TEXT, max_size=4))
def test_what_is_encoded_arrives_as_it_was(key: str, query: dict[str, str]) -> None:
    url = urlsplit(f"http://host{encode_path('/' + key)}?{encode_query(list(query.items()))}")
    assert dict(parse_qsl(url.query, keep_blank_values=True)) == query
    assert url.fragment == ""


def test_the_region_of_a_signature_can_be_read_back() -> None:
    headers = sign(
        method="GET",
        host="h",
        path="/",
        query="",
        headers=(),
        credentials=LONG_LIVED,
        region="eu-west-1",
        unix_s=0.0,
    )
    assert signed_region(headers) == "eu-west-1"
    assert signed_region(()) is None


def test_secrets_are_not_shown() -> None:
    assert "ASIAEXAMPLE" in repr(SESSION)
    assert "secret" not in repr(SESSION).replace("secret_access_key", "")
    assert "token" not in repr(SESSION).replace("session_token", "")


@pytest.mark.parametrize("key_bytes", [0, 1, 32, 63, 64, 65, 200])
def test_our_hmac_is_the_standard_librarys(key_bytes: int) -> None:
    key = bytes(range(200))[:key_bytes]
    for message in (b"", b"x", bytes(1000)):
        assert hmac_sha256(key, message) == hmac.digest(key, message, "sha256")


def test_signing_brings_no_openssl_along() -> None:
    code = "import sys; from teneral.loader.sources.s3 import sigv4; assert '_hashlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience_s(60))
