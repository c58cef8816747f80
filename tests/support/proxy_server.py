"""A forward proxy on loopback, through which names lead to servers of the tests: `gs.store.example` to the one that
was registered for it, and no name to any other.

    http://name/…   the request is sent on, without what is for the proxy alone
    CONNECT name    the connection is the client's then; with a certificate, TLS ends here, as in networks whose
                    proxy has an authority of its own
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import pytest

VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD")
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")


class ProxyCall(NamedTuple):
    """One request. Header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]


class ProxyServer:
    """A context manager. With `credentials` ("Basic …") it refuses all others."""

    def __init__(self, *, certificate: Path | None = None, credentials: str | None = None) -> None:
        self.calls: list[ProxyCall] = []
        self.status: int | None = None  # the answer to all requests, if there is to be one
        self.credentials = credentials
        self.targets: dict[str, tuple[str, int]] = {}
        self.tls: ssl.SSLContext | None = None
        if certificate is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(certificate)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def lead(self, name: str, url: str) -> str:
        """Have the name lead to the server at `url`; the host by which clients know it."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.targets[f"{name}.store.example"] = (parts.hostname, parts.port)
        return f"{name}.store.example"


def _handler(proxy: ProxyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except OSError:
                self.close_connection = True

        def do_CONNECT(self) -> None:
            backend = self._begin(self.path.rpartition(":")[0])
            if backend is None:
                return
            self.close_connection = True
            self.send_response(200, "Connection established")
            self.end_headers()
            client: socket.socket = self.connection
            if proxy.tls is not None:
                try:
                    client = proxy.tls.wrap_socket(client, server_side=True)
                except ssl.SSLError:  # the client does not trust it
                    return
            with client, socket.create_connection(backend) as server, suppress(OSError):
                _pour(client, server)

        def _pass_on(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            backend = self._begin(parts.hostname or "")
            if backend is None:
                return
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            connection = http.client.HTTPConnection(*backend)
            connection.putrequest(self.command, target, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if not name.lower().startswith("proxy-"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = _pass_on

        def _begin(self, host: str) -> tuple[str, int] | None:
            """The server that the request is for; None where it was refused."""
            headers = {name.lower(): value for name, value in self.headers.items()}
            proxy.calls.append(ProxyCall(self.command, self.path, headers))
            status = proxy.status
            if status is None and headers.get("proxy-authorization") != proxy.credentials:
                status = 407
            if status is None and host not in proxy.targets:
                status = 502
            if status is None:
                return proxy.targets[host]
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _pour(client: socket.socket, server: socket.socket) -> None:
    """Both ways, until one of them ends."""
    while True:
        pending = isinstance(client, ssl.SSLSocket) and client.pending()
        ready = [client] if pending else select.select([client, server], [], [])[0]
        for end in ready:
            piece = end.recv(1 << 16)
            if not piece:
                return
            (server if end is client else client).sendall(piece)


def use_proxy(patch: pytest.MonkeyPatch, proxy: ProxyServer, url: str | None = None) -> None:
    """Have this process, and those that it starts, see this proxy alone, and no certificates but the system's."""
    for name in (*VARIABLES, *CERTIFICATES):
        patch.delenv(name, raising=False)
        patch.delenv(name.lower(), raising=False)
    patch.setenv("HTTPS_PROXY", url or proxy.url)
    patch.setenv("HTTP_PROXY", url or proxy.url)
