"""A small Cloud Storage on loopback: its JSON API with conditions, sessions and pages, and a metadata server.

Tokens are checked as the real one does: a bearer token that it gave out, on all but an upload session's requests.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

QUANTUM_BYTES = 256 * 1024
METADATA_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


class Call:
    """One request: its method, path, query, headers in lower case, and body."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(target)
        self.method, self.path, self.headers, self.body = method, parts.path, headers, body
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))


Reply = tuple[int, dict[str, str], bytes]
Fault = Callable[[Call], Reply | None]


class GsServer:
    """A context manager. `fault` answers in place of the server where it gives a reply, or raises to hang up."""

    def __init__(self, *, page_objects: int = 2) -> None:
        self.objects: dict[str, dict[str, tuple[bytes, int]]] = {}  # bucket → key → content, generation
        self.codings: dict[str, str] = {}  # key → Content-Encoding
        self.calls: list[Call] = []
        self.tokens = {"token-1"}
        self.fault: Fault | None = None
        self.expires_in: Any = 3600
        self.anonymous = False
        self.sessions: dict[str, dict[str, Any]] = {}
        self._page_objects = page_objects
        self._generation = 1_700_000_000_000_000
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            owner: ClassVar[GsServer] = server

            def handle_one_request(self) -> None:
                try:
                    self._answer_one()
                except ConnectionError:  # a fault, or a client that gave up
                    self.close_connection = True

            def _answer_one(self) -> None:
                self.raw_requestline = self.rfile.readline(65_537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(length)
                if len(body) < length:  # the client was killed: half a request changes nothing
                    self.close_connection = True
                    return
                status, fields, answer = self.owner.answer(Call(self.command, self.path, headers, body))
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                if "Content-Length" not in fields and "Transfer-Encoding" not in fields:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.host = f"127.0.0.1:{self._http.server_port}"
        self.url = f"http://{self.host}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def num_tokens_asked(self) -> int:
        """Of the metadata server."""
        return sum(call.path == METADATA_PATH for call in self.calls)

    def put(self, bucket: str, key: str, content: bytes) -> int:
        with self._lock:
            return self._keep(bucket, key, content)

    def answer(self, call: Call) -> Reply:
        with self._lock:
            self.calls.append(call)
            fault = self.fault
        if fault is not None and (reply := fault(call)) is not None:
            return reply
        with self._lock:
            return self._route(call)

    def _route(self, call: Call) -> Reply:
        if call.path == METADATA_PATH:
            return self._metadata(call)
        session = call.query.get("upload_id")
        if session is not None and call.path.startswith("/upload/"):
            return self._session(call, session)
        authorization = call.headers.get("authorization", "")
        if not self.anonymous and authorization not in {f"Bearer {token}" for token in self.tokens}:
            return problem(401, "required", "Invalid Credentials")
        if self.anonymous and authorization:
            return problem(400, "invalid", "no token is wanted here")
        found = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", call.path)
        if found is None:
            return problem(404, "notFound", "Not Found")
        bucket, key = unquote(found[2]), unquote(found[3]) if found[3] else None
        if bucket not in self.objects:
            return problem(404, "notFound", "The specified bucket does not exist.")
        if found[1]:
            return self._upload(call, bucket)
        if key is None:
            return self._list(call, bucket)
        if call.method == "DELETE":
            if self.objects[bucket].pop(key, None) is None:
                return problem(404, "notFound", f"No such object: {bucket}/{key}")
            return 204, {}, b""
        return self._get(call, bucket, key)

    def _metadata(self, call: Call) -> Reply:
        if call.headers.get("metadata-flavor") != "Google":
            return 403, {}, b"Missing Metadata-Flavor:Google header."
        payload = {"access_token": max(self.tokens), "expires_in": self.expires_in, "token_type": "Bearer"}
        return 200, {"Metadata-Flavor": "Google"}, json.dumps(payload).encode()

    def _get(self, call: Call, bucket: str, key: str) -> Reply:
        if key not in self.objects[bucket]:
            return problem(404, "notFound", f"No such object: {bucket}/{key}")
        content, generation = self.objects[bucket][key]
        if call.query.get("alt") != "media":
            return 200, {}, json.dumps(resource(key, content, generation)).encode()
        if not matches(call, generation):
            return problem(412, "conditionNotMet", "At least one of the pre-conditions did not hold.")
        fields = {
            "x-goog-generation": str(generation),
            "x-goog-stored-content-encoding": self.codings.get(key, "identity"),
            "ETag": "CJDz9aPz5f0CEAE=",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers.get("range", ""))
        if span is None:
            return 200, fields, content
        start, end = int(span[1]), min(int(span[2]) + 1, len(content))
        if start >= len(content):
            return 416, {}, b"Requested range not satisfiable"
        fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return 206, fields, content[start:end]

    def _list(self, call: Call, bucket: str) -> Reply:
        after = call.query.get("pageToken", "")
        keys = sorted(
            key for key in self.objects[bucket] if key.startswith(call.query["prefix"]) and key > after
        )
        page = keys[: self._page_objects]
        payload: dict[str, Any] = {"kind": "storage#objects"}
        if page:  # as the real one: no items, no list
            payload["items"] = [resource(key, *self.objects[bucket][key]) for key in page]
        if len(keys) > len(page):
            payload["nextPageToken"] = page[-1]
        return 200, {}, json.dumps(payload).encode()

    def _upload(self, call: Call, bucket: str) -> Reply:
        key = call.query["name"]
        if call.query["uploadType"] == "media":
            return self._create(call, bucket, key, call.body)
        if not matches(call, self._generation_of(bucket, key)):
            return problem(412, "conditionNotMet", "At least one of the pre-conditions did not hold.")
        number = str(len(self.sessions) + 1)
        self.sessions[number] = {"call": call, "bucket": bucket, "key": key, "content": bytearray()}
        # Another host's name, as behind a proxy: the client must not follow it there.
        where = f"https://elsewhere.invalid{call.path}?uploadType=resumable&upload_id={number}"
        return 200, {"Location": where}, b""

    def _session(self, call: Call, number: str) -> Reply:
        if "authorization" in call.headers or number not in self.sessions:
            return problem(410, "gone", "no such session")
        session = self.sessions[number]
        content: bytearray = session["content"]
        if "reply" in session:
            reply: Reply = session["reply"]
            return reply
        if call.method == "DELETE":
            del self.sessions[number]
            return 499, {}, b""
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", call.headers["content-range"])
        if span is None or (span[1] and int(span[2]) + 1 - int(span[1]) != len(call.body)):
            return problem(400, "badRequest", "Failed to parse Content-Range header.")
        if span[1]:
            if int(span[1]) > len(content):
                return problem(503, "backendError", "out of order")
            if span[3] == "*" and len(call.body) % QUANTUM_BYTES:
                return problem(400, "badRequest", "not a multiple of 256 KiB")
            content += call.body[len(content) - int(span[1]) :]  # what is there already is ignored
        if span[3] != "*" and int(span[3]) == len(content):
            reply = self._create(session["call"], session["bucket"], session["key"], bytes(content))
            session["reply"] = reply
            return reply
        return 308, {"Range": f"bytes=0-{len(content) - 1}"} if content else {}, b""

    def _create(self, call: Call, bucket: str, key: str, content: bytes) -> Reply:
        if not matches(call, self._generation_of(bucket, key)):
            return problem(412, "conditionNotMet", "At least one of the pre-conditions did not hold.")
        generation = self._keep(bucket, key, content)
        return 200, {}, json.dumps(resource(key, content, generation)).encode()

    def _keep(self, bucket: str, key: str, content: bytes) -> int:
        self._generation += 1
        self.objects[bucket][key] = (content, self._generation)
        return self._generation

    def _generation_of(self, bucket: str, key: str) -> int:
        return self.objects[bucket][key][1] if key in self.objects[bucket] else 0


def matches(call: Call, generation: int) -> bool:
    wanted = call.query.get("ifGenerationMatch")
    return wanted is None or int(wanted) == generation


def resource(key: str, content: bytes, generation: int) -> dict[str, str]:
    """An object's metadata; sizes and generations are texts."""
    digest = b64encode(md5(content, usedforsecurity=False).digest()).decode()
    return {
        "name": key,
        "size": str(len(content)),
        "generation": str(generation),
        "md5Hash": digest,
        "updated": "2026-01-02T03:04:05.500Z",
    }


def problem(status: int, reason: str, message: str) -> Reply:
    payload = {
        "error": {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    }
    return status, {"Content-Type": "application/json"}, json.dumps(payload).encode()


@contextmanager
def serving_blob(patch: pytest.MonkeyPatch, data: bytes) -> Iterator[GsServer]:
    """A server with `data` as the object `a model/blob` of the bucket `models`, for whose account this process is."""
    with GsServer() as server:
        use_gs_account(patch, server)
        server.objects["models"] = {}
        server.put("models", "a model/blob", data)
        yield server


def use_gs_account(patch: pytest.MonkeyPatch, server: GsServer) -> None:
    """Have this process find the server's account, and nothing else of what the machine's user has set up."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT"):
        patch.delenv(name, raising=False)
    patch.setenv("CLOUDSDK_CONFIG", "/nonexistent")
    patch.setenv("GCE_METADATA_HOST", server.host)
