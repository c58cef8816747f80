"""Hostile answers of Cloud Storage and Blob Storage: each ends in an error of ours, bounded, and no secret leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gs_server import METADATA_PATH, Call, GsServer, Reply, use_gs_account

from teneral.loader.errors import AccessDeniedError, FormatError, SourceError, TeneralError
from teneral.loader.sources.az import answers as az_answers
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.gs import credentials
from teneral.loader.sources.gs.answers import parse_object, parse_page, parse_problem
from teneral.loader.sources.gs.store import GsStore
from teneral.loader.sources.http.head import Head

DEEP = b"[" * 200_000
GOOD: dict[str, Any] = {"name": "m/x", "size": "3", "generation": "17"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GsServer]:
    with GsServer() as server:
        use_gs_account(monkeypatch, server)
        monkeypatch.setattr(credentials, "PAUSE_S", 0.0)
        server.objects["models"] = {"m/x": (b"abc", 17)}
        yield server


@pytest.fixture
def store(server: GsServer) -> Iterator[GsStore]:
    opened = GsStore("gs://models/m", SourceOptions(endpoint_url=server.url, max_attempts=1))
    yield opened
    opened.close()


def answers(reply: Reply, *, to: Callable[[Call], bool]) -> Callable[[Call], Reply | None]:
    return lambda call: reply if to(call) else None


TOKENS: dict[str, bytes] = {
    "no JSON": b"<html>",
    "deep": DEEP,
    "a list": b"[]",
    "no UTF-8": b"\xff",
    "a header in it": json.dumps({"access_token": "a\r\nX-More: b", "expires_in": 60}).encode(),
    "empty": b'{"access_token": "", "expires_in": 60}',
    "of another kind": b'{"access_token": 7, "expires_in": 60}',
    "long": json.dumps({"access_token": "a" * 20_000, "expires_in": 60}).encode(),
    "larger than any": b" " * (1 << 20),
    "never": b'{"access_token": "a", "expires_in": NaN}',
    "a boolean": b'{"access_token": "a", "expires_in": true}',
    "long over": b'{"access_token": "a", "expires_in": -1}',
}


@pytest.mark.parametrize("body", TOKENS.values(), ids=TOKENS)
def test_what_is_no_token_is_refused(server: GsServer, store: GsStore, body: bytes) -> None:
    reply = (200, {"Metadata-Flavor": "Google"}, body)
    server.fault = answers(reply, to=lambda call: call.path == METADATA_PATH)
    with pytest.raises(AccessDeniedError):
        store.stat("x")
    assert all(call.path == METADATA_PATH for call in server.calls)


def test_an_answer_of_another_server_is_no_token(server: GsServer, store: GsStore) -> None:
    reply = (200, {}, b'{"access_token": "a", "expires_in": 60}')
    server.fault = answers(reply, to=lambda call: call.path == METADATA_PATH)
    with pytest.raises(AccessDeniedError, match="metadata"):
        store.stat("x")


def test_no_redirect_is_followed(server: GsServer, store: GsStore) -> None:
    with GsServer() as other:
        reply = (302, {"Location": f"{other.url}/storage/v1/b/models/o/m%2Fx"}, b"")
        server.fault = answers(reply, to=lambda call: call.path != METADATA_PATH)
        for ask in (lambda: store.stat("x"), lambda: store.put("y", b"1"), lambda: store.delete("x")):
            with pytest.raises(SourceError):
                ask()
        assert other.calls == []


PAGES: dict[str, bytes] = {
    "no JSON": b"<ListBucketResult>",
    "deep": DEEP,
    "a list": b"[]",
    "items of another kind": b'{"items": {}}',
    "an item of another kind": b'{"items": [1]}',
    "no name": b'{"items": [{"size": "1", "generation": "1"}]}',
    "a negative size": json.dumps({"items": [GOOD | {"size": "-1"}]}).encode(),
    "an endless size": json.dumps({"items": [GOOD | {"size": "9" * 5000}]}).encode(),
    "a size in other digits": json.dumps({"items": [GOOD | {"size": "\u0663"}]}).encode(),
    "a generation with a condition": json.dumps({"items": [GOOD | {"generation": '1"&x=1'}]}).encode(),
    "an empty token": b'{"items": [], "nextPageToken": ""}',
    "a token of another kind": b'{"nextPageToken": 5}',
}


@pytest.mark.parametrize("body", PAGES.values(), ids=PAGES)
def test_what_is_no_page_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        parse_page(body, where="gs://models/m")


def test_names_that_climb_out_or_lie_elsewhere_are_not_listed(server: GsServer, store: GsStore) -> None:
    names = ["m/../up", "m//x", "m/\x1b[2J", "other/x", "m/", "m/x"]
    body = json.dumps({"items": [GOOD | {"name": name} for name in names]}).encode()
    server.fault = answers((200, {}, body), to=lambda call: call.path.endswith("/o"))
    assert [info.name for info in store.list()] == ["x"]


def test_a_listing_without_an_end_is_given_up(
    server: GsServer, store: GsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teneral.loader.sources.http.bucket.MAX_PAGES", 5)
    body = b'{"nextPageToken": "again"}'
    server.fault = answers((200, {}, body), to=lambda call: call.path.endswith("/o"))
    with pytest.raises(SourceError, match="too many"):
        list(store.list())


LOCATIONS = ["", "nowhere", "ftp://x/y?upload_id=1", "https://x/path", f"https://x/y?{'z' * 9000}"]


@pytest.mark.parametrize("location", LOCATIONS, ids=range(len(LOCATIONS)))
def test_a_session_without_a_usable_address_is_refused(
    server: GsServer, store: GsStore, location: str
) -> None:
    server.fault = answers((200, {"Location": location}, b""), to=lambda call: call.method == "POST")
    with pytest.raises(SourceError), store.create("big") as writer:
        writer.write(bytes(17 << 20))


@pytest.mark.parametrize("reached", ["bytes=0-99999999999", "bytes=5-9", "junk", None])
def test_a_session_that_lies_about_its_bytes_ends(
    server: GsServer, store: GsStore, reached: str | None
) -> None:
    reply: Reply = (308, {"Range": reached} if reached else {}, b"")
    server.fault = answers(reply, to=lambda call: call.method == "PUT")
    with pytest.raises(SourceError), store.create("big") as writer:
        writer.write(bytes(17 << 20))


def test_an_upload_that_was_cut_is_noticed(server: GsServer, store: GsStore) -> None:
    body = json.dumps(GOOD).encode()
    server.fault = answers((200, {}, body), to=lambda call: call.headers.get("content-range", "*")[-1] != "*")
    with pytest.raises(SourceError, match="keeps 3 bytes"), store.create("big") as writer:
        writer.write(bytes(17 << 20))


@pytest.mark.parametrize("body", [b"", DEEP, b"{}", b" " * (2 << 20)], ids=["empty", "deep", "bare", "large"])
def test_an_answer_to_a_write_that_is_none_is_refused(server: GsServer, store: GsStore, body: bytes) -> None:
    server.fault = answers((200, {}, body), to=lambda call: call.method == "POST")
    with pytest.raises(TeneralError):
        store.put("y", b"1")


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_any_bytes_are_read_without_another_error(body: bytes) -> None:
    problem = parse_problem(body)
    assert len(problem.message) <= 500
    assert problem.message.isprintable()
    for parse in (lambda: parse_page(body, where="x"), lambda: parse_object(body, "x", where="x")):
        with suppress(FormatError):
            parse()


ENTRY = (
    "<Blob><Name>x</Name><Last-Modified>Sun, 06 Nov 1994 08:49:37 GMT</Last-Modified><Etag>0x1</Etag>"
    "<Content-Length>1</Content-Length></Blob>"
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<EnumerationResults>", "<html>"),
        ("<Name>x</Name>", ""),
        ("<Content-Length>1", "<Content-Length>-1"),
        ("<Content-Length>1", "<Content-Length>" + "9" * 5000),
        ("0x1", ""),
        ("0x1", "a\r\nX-More: b"),
        ("0x1", "y" * 5000),
    ],
    ids=range(7),
)
def test_what_is_no_page_of_blobs_is_refused(old: str, new: str) -> None:
    page = f"<EnumerationResults>{ENTRY}</EnumerationResults>"
    assert az_answers.parse_page(page.encode(), where="x").objects == (("x", 1, '"0x1"', 784111777),)
    with pytest.raises(FormatError):
        az_answers.parse_page(page.replace(old, new).encode(), where="x")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([400, 403, 404, 409, 412, 416, 500]))
def test_any_refusal_of_blob_storage_becomes_an_error_that_can_be_shown(body: bytes, status: int) -> None:
    head = Head(status, {}, keeps_alive=False)
    error = az_answers.explain(head, b"<Code>" + body, source="az://a/b", name="n", is_anonymous=False)
    assert error.message.isprintable()
