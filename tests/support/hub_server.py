"""A small Hugging Face Hub on loopback: repositories with commits, branches and large files, and the content
network that its redirects lead to, at an origin of its own.

Hugging Face's own library downloads from it. Large files (by Git LFS, as the Hub's .gitattributes has it) are
redirected to signed addresses, which the content network takes for as long as their signature is good; it refuses
requests that carry a token, as it must never see one.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest

LARGE = (".safetensors", ".gguf", ".bin", "tokenizer.json")
TREE_PAGE = 3  # files a page of a tree's listing, which the real one has, too


class Call(NamedTuple):
    """One request. Header names are in lower case."""

    server: str  # hub | content
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


Reply = tuple[int, dict[str, str], bytes]
Fault = Callable[[Call], Reply | None]


class Repository:
    """The commits of one model, newest last, and who may read it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.is_private = False
        self.readers: set[str] | None = None  # tokens that accepted the terms; None: not gated

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Make these the branch's files; the commit's number."""
        digest = hashlib.sha1(usedforsecurity=False)
        for part in (self.name, str(len(self.commits)), *sorted(files)):
            digest.update(part.encode())
        self.commits[digest.hexdigest()] = dict(files)
        self.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def commit_folder(self, folder: Path, *, branch: str = "main") -> str:
        paths = (path for path in folder.rglob("*") if path.is_file())
        return self.commit(
            {str(path.relative_to(folder)): path.read_bytes() for path in paths}, branch=branch
        )


class HubServer:
    """A context manager. `fault` answers in place of both servers where it gives a reply."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.calls: list[Call] = []
        self.fault: Fault | None = None
        self.contents: dict[str, bytes] = {}  # large files by their SHA-256; damage them here
        self._signatures: set[str] = set()
        self._num_signatures = 0
        self._lock = threading.Lock()
        self._hub = _listen(self, "hub")
        self._content = _listen(self, "content")
        self.url = f"http://127.0.0.1:{self._hub.server_port}"
        self.content_url = f"http://127.0.0.1:{self._content.server_port}"

    def __enter__(self) -> Self:
        for server in (self._hub, self._content):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self._hub, self._content):
            server.shutdown()
            server.server_close()

    def repository(self, name: str, files: dict[str, bytes] | Path | None = None) -> Repository:
        """A new one, with these files or this folder's as its first commit."""
        made = self.repositories[name] = Repository(name)
        if isinstance(files, Path):
            made.commit_folder(files)
        elif files is not None:
            made.commit(files)
        return made

    def expire(self) -> None:
        """Let the addresses that redirects gave so far be good no longer."""
        with self._lock:
            self._signatures.clear()

    def calls_of(self, server: str, path: str = "") -> list[Call]:
        return [call for call in list(self.calls) if call.server == server and path in call.path]

    def answer(self, call: Call) -> Reply:
        with self._lock:
            self.calls.append(call)
            fault = self.fault
        if fault is not None and (reply := fault(call)) is not None:
            return reply
        with self._lock:
            return self.hub_answer(call) if call.server == "hub" else self._content_answer(call)

    def hub_answer(self, call: Call) -> Reply:
        found = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)"
            r"|/([^/]+/[^/]+)/(resolve)/(refs%2F[^/]+|[^/]+)/(.+)",
            call.path,
        )
        if found is None:
            return _problem(404, "", "Not found")
        name, kind = found[1] or found[4], found[2] or found[5]
        repository = self.repositories.get(name)
        token = call.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            return _problem(401, "", "Invalid credentials in Authorization header")
        if repository is None or (repository.is_private and not token):
            return _problem(404 if token else 401, "RepoNotFound", "Repository not found")
        if kind == "resolve" and repository.readers is not None and token not in repository.readers:
            status = 403 if token else 401
            message = (
                f"Access to model {name} is restricted. You must have access to it and be authenticated."
            )
            return _problem(status, "GatedRepo", message)
        revision = unquote(found[3] or found[6])
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return _problem(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if kind == "revision":
            return _json(
                {"id": name, "sha": commit, "gated": False, "siblings": _siblings(files, call.query)}
            )
        if kind == "tree":
            return self._tree(call, files)
        return self._resolve(call, commit, files, unquote(found[7]))

    def _tree(self, call: Call, files: dict[str, bytes]) -> Reply:
        entries = [_tree_entry(name, files[name]) for name in sorted(files)]
        begin = int(call.query.get("cursor", "0"))
        status, headers, body = _json(entries[begin : begin + TREE_PAGE])
        if begin + TREE_PAGE < len(entries):
            more = f"{self.url}{call.path}?recursive=true&cursor={begin + TREE_PAGE}"
            headers["Link"] = f'<{more}>; rel="next"'
        return status, headers, body

    def _resolve(self, call: Call, commit: str, files: dict[str, bytes], name: str) -> Reply:
        if name not in files:
            return _problem(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        content = files[name]
        if not is_large(name):
            return _ranged(call, content, {"ETag": f'"{git_sha1(content)}"', "X-Repo-Commit": commit})
        sha256 = sha256_of(content)
        self.contents.setdefault(sha256, content)
        self._num_signatures += 1
        signature = str(self._num_signatures)
        self._signatures.add(signature)
        headers = {
            "Location": f"{self.content_url}/{quote(sha256)}?sig={signature}&Expires=3600",
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
        }
        return 302, headers, b"Found. Redirecting"

    def _content_answer(self, call: Call) -> Reply:
        if "authorization" in call.headers:
            return 400, {}, b"Only one auth mechanism allowed"
        if call.query.get("sig") not in self._signatures:
            return 403, {}, b"Request has expired"
        # An ETag of its own, which is none of the Hub's.
        return _ranged(call, self.contents[call.path.strip("/")], {"ETag": '"of-the-content-network"'})


def _listen(owner: HubServer, name: str) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            headers = {field.lower(): value for field, value in self.headers.items()}
            call = Call(name, self.command, parts.path, dict(parse_qsl(parts.query)), headers)
            status, fields, body = owner.answer(call)
            with suppress(ConnectionError):  # a client that gave up
                self.send_response(status)
                for field, value in {"Content-Length": str(len(body)), **fields}.items():
                    self.send_header(field, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        do_HEAD = do_GET

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


@functools.cache
def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _lfs(content: bytes) -> dict[str, Any]:
    return {"sha256": sha256_of(content), "size": len(content), "pointerSize": 134}


def _siblings(files: dict[str, bytes], query: dict[str, str]) -> list[dict[str, Any]]:
    if query.get("blobs") != "true":
        return [{"rfilename": name} for name in files]
    return [
        {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        | ({"lfs": _lfs(content)} if is_large(name) else {})
        for name, content in files.items()
    ]


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": git_sha1(content), "size": len(content), "path": name}
    lfs = {"oid": sha256_of(content), "size": len(content), "pointerSize": 134}
    return entry | ({"lfs": lfs} if is_large(name) else {})


def _ranged(call: Call, content: bytes, headers: dict[str, str]) -> Reply:
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    if span is None:
        return 200, headers, content
    start = int(span[1])
    end = min(int(span[2]) + 1 if span[2] else len(content), len(content))
    if start >= len(content):
        return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
    return 206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}, content[start:end]


def _json(value: Any) -> Reply:
    return 200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode()


def _problem(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Reply:
    fields = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | (headers or {})
    return status, fields, json.dumps({"error": message}).encode()


def hub_variables(server: HubServer, home: Path) -> dict[str, str]:
    """The environment of a process whose Hub this is, with a cache of its own."""
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


def use_hub(patch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Have this process find the server, and nothing else of what the machine's user has set up."""
    from huggingface_hub import constants  # which reads the environment as it is imported

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name, value in hub_variables(server, home).items():
        patch.setenv(name, value)


def main() -> None:
    """A Hub with one model, a folder's, until it is ended; prints its address. `--content-url` is that of a web server
    that has the large files by their SHA-256, in place of the content network here.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="org/name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--content-url")
    options = parser.parse_args()
    with HubServer() as server:
        server.content_url = options.content_url or server.content_url
        server.repository(options.name, options.folder)
        for content in next(iter(server.repositories[options.name].commits.values())).values():
            sha256_of(content)
            git_sha1(content)
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
