"""Credentials of a container's role: asked for as the platforms say, renewed in time, and never in place of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.credentials import ReadOnlyCredentials
from tests.support.store_server import StoreServer

from teneral.loader.errors import AccessDeniedError
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.s3 import container_credentials
from teneral.loader.sources.s3.container_credentials import find_endpoint
from teneral.loader.sources.s3.credentials import CredentialChain
from teneral.loader.sources.s3.store import S3Store

BOTO = ReadOnlyCredentials("AKIABOTO", "secret", None)
FULL = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
RELATIVE = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"


class Platform:
    """A credential service on this machine. `answer` is what it says; a number is a status."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.requests: list[tuple[str, str | None]] = []  # path, Authorization
        platform = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                platform.requests.append((self.path, self.headers.get("Authorization")))
                reply = platform.answer
                status, body = (reply, b"no") if isinstance(reply, int) else (200, reply)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/role"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def gives(self, key: str, *, expires_in_s: float | None = 6 * 3600, token: str | None = "token") -> None:
        reply = {"AccessKeyId": key, "SecretAccessKey": "secret", "Token": token, "RoleArn": "arn:x"}
        if expires_in_s is not None:
            then = time.gmtime(time.time() + expires_in_s)
            reply["Expiration"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", then)
        self.answer = json.dumps(reply).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def platform() -> Iterator[Platform]:
    platform = Platform()
    platform.gives("AKIAROLE")
    yield platform
    platform.close()


@pytest.fixture(autouse=True)
def boto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The chain of boto3 has `BOTO`; what asked for it is noted."""
    asked: list[str] = []

    class Provider:
        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            return BOTO

    def give(_: Any) -> Provider:
        asked.append("boto")
        return Provider()

    monkeypatch.setattr(boto3.session.Session, "get_credentials", give)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(container_credentials, "AGAIN_S", 0.0)
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    return asked


def chain(platform: Platform, *, profile: str | None = None, **environment: str) -> CredentialChain:
    return CredentialChain({FULL: platform.url, **environment}, profile=profile)


def test_a_roles_credentials_are_asked_for_once(platform: Platform, boto: list[str]) -> None:
    credentials = chain(platform)
    assert platform.requests == []
    for _ in range(3):
        assert credentials.get() == ("AKIAROLE", "secret", "token")
    assert platform.requests == [("/role", None)]
    assert boto == []


def test_the_token_of_the_platform_goes_along_as_it_is_then(platform: Platform, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("Bearer one")
    credentials = chain(
        platform, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(file), AWS_CONTAINER_AUTHORIZATION_TOKEN="other"
    )
    credentials.get()
    file.write_text("Bearer two")
    credentials.forget()
    credentials.get()
    chain(platform, AWS_CONTAINER_AUTHORIZATION_TOKEN="other").get()
    assert [given for _, given in platform.requests] == ["Bearer one", "Bearer two", "other"]


def test_they_are_renewed_before_they_expire(platform: Platform) -> None:
    platform.gives("AKIAFIRST", expires_in_s=590)
    credentials = chain(platform)
    assert credentials.get().access_key_id == "AKIAFIRST"
    platform.gives("AKIASECOND")
    assert [credentials.get().access_key_id for _ in range(3)] == ["AKIASECOND"] * 3
    assert len(platform.requests) == 2


def test_they_are_good_until_they_expire_whatever_the_platform_says(
    platform: Platform, boto: list[str]
) -> None:
    platform.gives("AKIAFIRST", expires_in_s=2)
    credentials = chain(platform)
    credentials.get()
    platform.answer = 500
    assert credentials.get().access_key_id == "AKIAFIRST"
    time.sleep(2.1)
    assert credentials.get().access_key_id == "AKIABOTO"
    assert boto == ["boto"]


def test_those_that_never_expire_are_kept(platform: Platform) -> None:
    platform.gives("AKIAEVER", expires_in_s=None, token=None)
    credentials = chain(platform)
    assert [credentials.get() for _ in range(2)] == [("AKIAEVER", "secret", None)] * 2
    assert len(platform.requests) == 1


def test_a_refused_token_is_asked_for_again(platform: Platform) -> None:
    credentials = chain(platform)
    credentials.get()
    assert not credentials.renew("token")  # the same again
    platform.gives("AKIANEW", token="new")
    assert credentials.renew("token")
    assert credentials.get().access_key_id == "AKIANEW"


BAD: dict[str, Any] = {
    "not found": 404,
    "redirected": 302,
    "no JSON": b"<html>",
    "a list": b"[]",
    "no secret": b'{"AccessKeyId": "A"}',
    "empty": b'{"AccessKeyId": "", "SecretAccessKey": ""}',
    "of another kind": b'{"AccessKeyId": 1, "SecretAccessKey": 2}',
    "no time": b'{"AccessKeyId": "A", "SecretAccessKey": "B", "Expiration": "tomorrow"}',
    "no UTF-8": b"\xff",
    "too long": b" " * (1 << 20),
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_what_is_no_answer_is_left_to_boto(platform: Platform, boto: list[str], answer: Any) -> None:
    platform.answer = answer
    assert chain(platform).get().access_key_id == "AKIABOTO"
    assert boto == ["boto"]
    assert len(platform.requests) == 1


def test_a_platform_that_is_not_there_is_left_to_boto(platform: Platform, tmp_path: Path) -> None:
    platform.close()
    assert chain(platform).get().access_key_id == "AKIABOTO"
    missing = chain(platform, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(tmp_path / "none"))
    assert missing.get().access_key_id == "AKIABOTO"


def test_no_header_is_smuggled_in(platform: Platform) -> None:
    credentials = chain(platform, AWS_CONTAINER_AUTHORIZATION_TOKEN="a\r\nX-More: b")
    assert credentials.get().access_key_id == "AKIABOTO"
    assert platform.requests == []


def test_what_comes_first_in_botos_chain_comes_first(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert chain(platform, **given).get().access_key_id == "AKIAENV"
    monkeypatch.setattr(boto3.session, "Session", lambda profile_name: boto3._get_default_session())
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        assert chain(platform, **{name: "x"}).get().access_key_id == "AKIABOTO"
    assert chain(platform, profile="x").get().access_key_id == "AKIABOTO"
    assert chain(platform, AWS_ACCESS_KEY_ID="half").get().access_key_id == "AKIABOTO"
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        file = tmp_path / variable
        file.write_text("[default]\n")
        assert chain(platform, **{variable: str(file)}).get().access_key_id == "AKIABOTO"
    assert platform.requests == []
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\n")
    assert chain(platform).get().access_key_id == "AKIABOTO"
    assert platform.requests == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (RELATIVE, "/v2/credentials/1-2", "http://169.254.170.2/v2/credentials/1-2"),
        (FULL, "http://169.254.170.23/v1/credentials", "http://169.254.170.23/v1/credentials"),
        (FULL, "http://[fd00:ec2::23]/v1/credentials", "http://[fd00:ec2::23]/v1/credentials"),
        (FULL, "http://localhost:51679/x?y=1", "http://localhost:51679/x?y=1"),
        (FULL, "http://127.8.0.1:1", "http://127.8.0.1:1/"),
        (FULL, "http://[::1]:8080/x", "http://[::1]:8080/x"),
        (FULL, "https://localhost/x", None),
        (FULL, "http://169.254.169.254/x", None),
        (FULL, "http://example.com/x", None),
        (FULL, "http://127.0.0.1.example.com/x", None),
        (FULL, "http://user@127.0.0.1/x", None),
        (FULL, "http://127.0.0.1:0/x", None),
        (FULL, "http://127.0.0.1:65536/x", None),
        (FULL, "http://127.0.0.1/a b", None),
        (FULL, "http://127.0.0.1/a\r\nX: y", None),
        (RELATIVE, "v2", None),
        (RELATIVE, "/v2 HTTP/1.1\r\nX: y", None),
        (RELATIVE, "", None),
    ],
)
def test_only_platforms_are_asked(name: str, value: str, expected: str | None) -> None:
    endpoint = find_endpoint({name: value})
    assert (endpoint and f"{endpoint.origin}{endpoint.target}") == expected


def test_the_relative_address_goes_first() -> None:
    endpoint = find_endpoint({RELATIVE: "/a", FULL: "http://127.0.0.1/b"})
    assert endpoint is not None
    assert endpoint.origin.host == "169.254.170.2"


def test_without_credentials_the_error_lists_the_ways_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3.session.Session, "get_credentials", lambda _: None)
    with pytest.raises(AccessDeniedError, match="there are no credentials"):
        CredentialChain({}, profile=None).get()


def test_a_store_is_read_under_a_role_without_boto(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root" / "models" / "m").mkdir(parents=True)
    (tmp_path / "root" / "models" / "m" / "blob").write_bytes(b"weights")
    monkeypatch.setenv(FULL, platform.url)
    with StoreServer(tmp_path / "root") as store:
        source = S3Store("s3://models/m", SourceOptions(endpoint_url=store.url, region="eu-west-1"))
        tokens: list[str] = []
        store.set_fault(lambda request: tokens.append(request.headers["x-amz-security-token"]))
        assert source.read("blob", max_bytes=100)[0] == b"weights"
        source.close()
        assert tokens == ["token"]
        code = (
            "import sys\n"
            "from teneral.loader.sources.open import open_source\n"
            "from teneral.loader.sources.base import SourceOptions\n"
            f"source = open_source('s3://models/m', SourceOptions(endpoint_url={store.url!r}))\n"
            "print(len(source.read('blob', max_bytes=100)[0]))\n"
            "source.close()\n"
            "print([name for name in ('boto3', 'botocore', 'ssl', 'datetime') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["7", "[]"]
