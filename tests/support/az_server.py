"""A small Blob Storage on loopback: blobs, blocks, conditions and pages, and the platforms' token services.

Credentials are checked as the real one does: Shared Key signatures are computed anew, all others compared.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import b64decode, b64encode
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

import pytest
from tests.support.gs_server import Call, GsServer, Reply

ACCOUNT = "teneralaccount"
KEY = b64encode(b"a key of the account for tests").decode()
SAS = "sv=2021-08-06&sr=c&sp=rcwl&sig=abc%2Bdef%3D"
IMDS_PATH = "/metadata/identity/oauth2/token"
FOREIGN = (
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "IDENTITY_ENDPOINT",
    "IDENTITY_HEADER",
)  # fmt: skip


class AzServer(GsServer):
    """`auth` is what requests must carry: key, sas, token or none. The address of blobs is /ACCOUNT/CONTAINER/BLOB."""

    def __init__(self, *, auth: str = "key") -> None:
        super().__init__()
        self.auth = auth
        self.blocks: dict[str, dict[str, bytes]] = {}  # key → block id → content
        self.token_calls: list[Call] = []

    @property
    def endpoint(self) -> str:
        return f"{self.url}/{ACCOUNT}"

    def _route(self, call: Call) -> Reply:
        if call.path in (IMDS_PATH, "/msi/token") or call.path.endswith("/oauth2/v2.0/token"):
            return self._token(call)
        if (refused := self._refused(call)) is not None:
            return refused
        found = re.fullmatch(rf"/{ACCOUNT}/([^/]+)(?:/(.+))?", call.path)
        assert found is not None, call.path
        container, key = found[1], unquote(found[2] or "")
        if container not in self.objects:
            return problem(404, "ContainerNotFound")
        if not key:
            return self._blobs(call, container)
        if call.method == "GET":
            return self._blob(call, container, key)
        if call.method == "DELETE":
            if self.objects[container].pop(key, None) is None:
                return problem(404, "BlobNotFound")
            return 202, {}, b""
        return self._write(call, container, key)

    def _token(self, call: Call) -> Reply:
        self.token_calls.append(call)
        if call.path == IMDS_PATH:
            good = call.headers.get("metadata") == "true" and call.query["resource"].endswith("azure.com/")
            reply: dict[str, object] = {"expires_in": str(self.expires_in)}
        elif call.path == "/msi/token":
            good = call.headers.get("x-identity-header") == "header" and "resource" in call.query
            reply = {"expires_on": "4102444800"}
        else:
            form = dict(parse_qsl(call.body.decode()))
            proof = form.get("client_secret") == "s=c&r t" or form.get("client_assertion") == "assertion"
            good = call.path.startswith("/tenant/") and form["client_id"] == "client" and proof
            reply = {"expires_in": 3600}
        reply["access_token"] = max(self.tokens)
        return (200, {}, json.dumps(reply).encode()) if good else (400, {}, b"{}")

    def _refused(self, call: Call) -> Reply | None:
        given = call.headers.get("authorization", "")
        if "x-ms-version" not in call.headers or not call.headers.get("x-ms-date", "").endswith(" GMT"):
            return problem(400, "MissingRequiredHeader")
        if self.auth == "sas":
            is_good = not given and call.query.get("sig") == "abc+def="
            return None if is_good else problem(403, "AuthenticationFailed")
        if self.auth == "token":
            is_good = given in {f"Bearer {token}" for token in self.tokens}
            return None if is_good else problem(401, "InvalidAuthenticationInfo")
        if self.auth == "none":
            return problem(400, "InvalidHeaderValue") if given else None
        return (
            None
            if given == f"SharedKey {ACCOUNT}:{signature(call)}"
            else problem(403, "AuthenticationFailed")
        )

    def _blob(self, call: Call, container: str, key: str) -> Reply:
        if key not in self.objects[container]:
            return problem(404, "BlobNotFound")
        content, number = self.objects[container][key]
        if call.headers.get("if-match", etag(number)) != etag(number):
            return problem(412, "ConditionNotMet")
        fields = {"ETag": etag(number)}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers.get("range", ""))
        if span is None:
            return 200, fields, content
        start, end = int(span[1]), min(int(span[2]) + 1, len(content))
        if start >= len(content):
            return problem(416, "InvalidRange")
        fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return 206, fields, content[start:end]

    def _blobs(self, call: Call, container: str) -> Reply:
        assert (call.query["restype"], call.query["comp"]) == ("container", "list")
        prefix, after = call.query.get("prefix", ""), call.query.get("marker", "")
        keys = sorted(key for key in self.objects[container] if key.startswith(prefix) and key > after)
        page = keys[: self._page_objects]
        blobs = "".join(entry(key, *self.objects[container][key]) for key in page)
        more = f"<NextMarker>{escape(page[-1])}</NextMarker>" if len(keys) > len(page) else "<NextMarker />"
        document = f'\ufeff<?xml version="1.0"?><EnumerationResults><Blobs>{blobs}</Blobs>{more}</EnumerationResults>'
        return 200, {}, document.encode()

    def _write(self, call: Call, container: str, key: str) -> Reply:
        if call.query.get("comp") == "block":
            blocks = self.blocks.setdefault(key, {})
            blocks[call.query["blockid"]] = call.body
            if len({len(b64decode(block)) for block in blocks}) > 1:
                return problem(400, "InvalidBlobOrBlock")
            return 201, {}, b""
        held = self.objects[container].get(key)
        if held is not None and call.headers.get("if-none-match") == "*":
            return problem(409, "BlobAlreadyExists")
        wanted = call.headers.get("if-match")
        if wanted is not None and (held is None or wanted != etag(held[1])):
            return problem(412, "ConditionNotMet")
        content = call.body
        if call.query.get("comp") == "blocklist":
            names = re.findall("<Latest>([^<]*)</Latest>", call.body.decode())
            if not set(names) <= set(self.blocks.get(key, {})):
                return problem(400, "InvalidBlockList")
            content = b"".join(self.blocks[key][name] for name in names)
        elif call.headers.get("x-ms-blob-type") != "BlockBlob":
            return problem(400, "MissingRequiredHeader")
        self.blocks.pop(key, None)
        return 201, {"ETag": etag(self._keep(container, key, content))}, b""


def signature(call: Call) -> str:
    length = call.headers.get("content-length", "0")
    names = "content-md5 content-type date if-modified-since if-match if-none-match if-unmodified-since range"
    lines = [call.method, "", "", "" if length == "0" else length]
    lines += [call.headers.get(name, "") for name in names.split()]
    lines += [f"{name}:{value}" for name, value in sorted(call.headers.items()) if name.startswith("x-ms-")]
    lines.append(f"/{ACCOUNT}{call.path}")
    lines += [f"{name}:{value}" for name, value in sorted(call.query.items())]
    return b64encode(hmac.digest(b64decode(KEY), "\n".join(lines).encode(), "sha256")).decode()


def etag(number: int) -> str:
    return f'"0x{number:X}"'


def entry(key: str, content: bytes, number: int) -> str:
    properties = f"<Etag>{etag(number)[1:-1]}</Etag><Content-Length>{len(content)}</Content-Length>"
    return f"<Blob><Name>{escape(key)}</Name><Properties>{properties}</Properties></Blob>"


def problem(status: int, code: str) -> Reply:
    document = (
        f'\ufeff<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code} at 10:00</Message></Error>'
    )
    return status, {"x-ms-error-code": code}, document.encode()


def use_az_account(patch: pytest.MonkeyPatch, server: AzServer) -> None:
    """Have this process find the server's account, and nothing else of what the machine's user has set up."""
    for name in FOREIGN:
        patch.delenv(name, raising=False)
    patch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", server.url)
    if server.auth == "key":
        patch.setenv("AZURE_STORAGE_KEY", KEY)
    if server.auth == "sas":
        patch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{SAS}")
