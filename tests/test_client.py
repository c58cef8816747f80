"""Signatures of clients: a server on loopback computes each again by AWS's published algorithm, and refuses others."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

import httpx2
import openai
import pytest
import requests

from teneral.client import AwsSignature
from teneral.loader.errors import UsageError

KEY_ID, SECRET, TOKEN, REGION = (
    "AKIDEXAMPLE",
    "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "a-token",
    "eu-central-1",
)
ANSWER = {"id": "1", "object": "text_completion", "created": 1, "model": "chat", "choices": []}


def signature(method: str, target: str, headers: dict[str, str], body: bytes) -> str:
    """https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html"""
    path, _, query = target.partition("?")
    scope, names = re.findall(r"Credential=[^/]+/(\S+), SignedHeaders=(\S+),", headers["authorization"])[0]
    pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
    quoted = [f"{urllib.parse.quote(k, '-_.~')}={urllib.parse.quote(v, '-_.~')}" for k, v in pairs]
    signed = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in names.split(";"))
    canonical = [method, urllib.parse.quote(path), "&".join(quoted), signed, names]
    digest = hashlib.sha256("\n".join([*canonical, hashlib.sha256(body).hexdigest()]).encode()).hexdigest()
    key = f"AWS4{SECRET}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, digest])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers 200 to what is signed for this region and with the session's token, else 403."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        given = headers.get("authorization", "").rpartition("Signature=")[2]
        allowed = (
            f"/{REGION}/lambda/aws4_request" in headers.get("authorization", "")
            and headers["x-amz-security-token"] == TOKEN
            and given == signature("POST", self.path, headers, body)
        )
        text = json.dumps(ANSWER if allowed else {"message": "Forbidden"}).encode()
        self.send_response(200 if allowed else 403)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in (("ACCESS_KEY_ID", KEY_ID), ("SECRET_ACCESS_KEY", SECRET), ("SESSION_TOKEN", TOKEN)):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_httpx_and_requests_sign_path_query_and_body(url: str) -> None:
    target = f"{url}/v1/models/a b?b=2&a=x%2Fy"
    with httpx2.Client(auth=AwsSignature(REGION)) as client:
        assert client.post(target, json={"prompt": "é"}).status_code == 200
        assert client.post(url, content=b"").status_code == 200
    assert requests.post(target, json={"a": 1}, auth=AwsSignature(REGION), timeout=30).status_code == 200
    assert requests.post(url, auth=AwsSignature("us-east-1"), timeout=30).status_code == 403
    assert requests.post(url, timeout=30).status_code == 403


def test_openais_client_signs_its_calls(url: str) -> None:
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        http_client=openai.DefaultHttpxClient(auth=AwsSignature(REGION)),
    ) as client:
        assert client.completions.create(model="chat", prompt="Hello").model == "chat"


def test_the_region_is_that_of_a_functions_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for address, region in (
        ("https://abcdefgh.lambda-url.ap-south-1.on.aws/v1/models", "ap-south-1"),
        ("https://example.com/?https://a.lambda-url.eu-west-1.on.aws", "us-east-1"),
    ):
        request = AwsSignature()(httpx2.Request("GET", address))
        assert f"/{region}/lambda/aws4_request" in request.headers["authorization"]


def test_what_is_missing_is_named(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    with pytest.raises(UsageError, match="region"):
        AwsSignature()(httpx2.Request("GET", url))
    with pytest.raises(UsageError, match="stream"):
        requests.post(url, data=iter([b"a"]), auth=AwsSignature(REGION), timeout=30)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="no credentials"):
        AwsSignature(REGION)(httpx2.Request("GET", url))
