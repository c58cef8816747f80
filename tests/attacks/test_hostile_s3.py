"""Hostile refusals of an S3-compatible store: none of its words forges a line, or breaks the answers that quote it."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer

from teneral.loader.errors import SourceError
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.xml import parse_page, parse_problem
from teneral.loader.sources.s3.answers import explain
from teneral.loader.sources.s3.store import S3Store

WAIT_S = patience_s(60)
# An escape sequence, a line that looks like the log's own, and half of a surrogate pair.
HOSTILE = "Denied\x1b[2J\nERROR: forged&#10;ERROR: forged, too &#xD800; &#x1b;[31m\x9b31m &#x202E;"


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=200),
    st.sampled_from(["Code", "Message", "Region"]),
    st.sampled_from([301, 400, 403, 404]),
)
def test_any_refusal_becomes_an_error_that_can_be_shown(text: str, tag: str, status: int) -> None:
    body = f"<Error><{tag}>{text}</{tag}></Error>".encode(errors="replace")
    code, message, region = parse_problem(body)
    error = explain(code, status, message, source="s3://a/b", name="n", region=region)
    assert error.message.isprintable()
    assert (error.hint or " ").isprintable()


@pytest.mark.parametrize("entity", ["&#xD800;", "&#55296;", "&#xDFFF;", "&#x110000;"])
def test_half_a_surrogate_pair_is_replaced(entity: str) -> None:
    assert parse_problem(f"<Message>a{entity}b</Message>".encode()).message == "a\ufffdb"
    entry = f"<Contents><Key>a{entity}</Key><Size>1</Size></Contents>"
    token = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{entity}</NextContinuationToken>"
    page = parse_page(f"<ListBucketResult>{entry}{token}</ListBucketResult>".encode(), where="x")
    assert (page.objects[0].key, page.next_token) == ("a\ufffd", "\ufffd")


def test_what_boto3_quotes_is_filtered_too() -> None:
    error = explain("A\x1b[2J", 400, "b\nERROR: forged \ud800", source="s3://a/b", name="n", region="x\ny")
    assert error.message.isprintable()
    assert error.message.encode()


def test_a_read_names_the_refusal_on_one_line(tmp_path: Path) -> None:
    with StoreServer(tmp_path, fault=lambda request: Fault(status=400, code=HOSTILE)) as server:
        store = S3Store("s3://models/m", SourceOptions(endpoint_url=server.url, anonymous=True))
        with pytest.raises(SourceError, match="forged, too") as caught:
            store.read("manifest.json", max_bytes=100)
        store.close()
    assert caught.value.message.isprintable()


def test_requests_during_a_load_that_such_a_refusal_fails_get_its_error(tmp_path: Path) -> None:
    port = free_port()
    fault = Fault(status=400, code=HOSTILE, first_byte_s=0.5)
    with StoreServer(tmp_path, fault=lambda request: fault) as store:
        command = [sys.executable, "-m", "teneral", "serve", "s3://models/m", "--anonymous"]
        command += ["--endpoint-url", store.url, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            answer = ask_early(port)
            assert answer.status == 503
            assert json.loads(answer.read())["error"]["message"].isprintable()
            _, stderr = server.communicate(timeout=WAIT_S)
            assert "Traceback" not in stderr
            assert "forged, too" in stderr
            assert not [line for line in stderr.splitlines() if line.startswith("ERROR: forged")]
            assert "\x1b" not in stderr
        finally:
            server.kill()
            server.communicate()


def ask_early(port: int) -> http.client.HTTPResponse:
    """The answer to a request that was sent as soon as the port was open."""
    while True:
        try:
            early = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            break
        except ConnectionRefusedError:
            time.sleep(0.005)
    with early:
        body = json.dumps({"model": "m", "prompt": "x"})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        early.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = http.client.HTTPResponse(early)
        answer.begin()
        return answer
