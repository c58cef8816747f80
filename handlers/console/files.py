"""The console's files: read with their first request, or put into one page with a timeline inside.

The page is plain HTML, CSS and JavaScript without a build step. It loads nothing from another place, runs no inline
script, and learns how it is served from two attributes of its root element: `data-mode` (server, pool or file) and
`data-key` (none or needed). This module knows no web server: two of them send these files.
"""

from __future__ import annotations

import functools
import os.path
from typing import Any, NamedTuple

ASSETS = ("console.js", "console.svg")
# Answered without a key: a browser asks for them before it has one, and they hold nothing of this server.
PATHS = frozenset({"/", *(f"/{name}" for name in ASSETS)})
# Of console.css, which lies in the page; a test has it where the file has changed. To compute it here would import
# hashlib, and with it OpenSSL: 30 ms of the first paint while the server starts.
STYLE_SHA256 = "zqFQbkzyPT3Lix82I57DtzoYUgOce7YeqW7nvbXWfYo="
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'sha256-{STYLE_SHA256}'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# In the order in which they are run: each uses names of those before it.
SCRIPTS = (
    "base.js",
    "picture.js",
    "waterfall.js",
    "start.js",
    "markdown.js",
    "playground.js",
    "tokens.js",
    "kv.js",
    "load.js",
    "pool.js",
    "artifact.js",
    "main.js",
)
_TYPES = {"html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_ROOT = 'data-mode="server" data-key="none"'
_ICON = '<link rel="icon" href="console.svg">\n'
_STYLE = '<link rel="stylesheet" href="console.css">'
_SCRIPT = '<script src="console.js" defer></script>\n'


class FileResponse(NamedTuple):
    """One file as an HTTP response."""

    status: int  # 200, or 304 for a client that has the file already
    headers: dict[str, str]
    body: bytes


class PageFiles:
    """The page and its files as responses, each kept from its first request on. `mode` is server or pool."""

    def __init__(self, *, mode: str = "server", needs_key: bool = False) -> None:
        self._mode = mode
        self._needs_key = needs_key
        self._answers: dict[str, FileResponse] = {}  # by path

    def answer(self, path: str, known_tag: str | None = None) -> FileResponse:
        """The file at one of `PATHS`; 304 if `known_tag`, an `If-None-Match` header, names it. Raises `OSError` where
        it cannot be read.
        """
        if path not in self._answers:
            self._answers[path] = self._read(path)
        answer = self._answers[path]
        if known_tag != answer.headers["ETag"]:
            return answer
        headers = {name: value for name, value in answer.headers.items() if name != "Content-Type"}
        return FileResponse(304, headers, b"")

    def _read(self, path: str) -> FileResponse:
        import zlib  # a start does without it

        name = path.removeprefix("/") or "index.html"
        body = page(mode=self._mode, needs_key=self._needs_key) if path == "/" else asset(name)
        headers = {
            "Content-Type": f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": f'"{zlib.crc32(body):08x}-{len(body)}"',
        }
        return FileResponse(200, headers, body)


def page(*, mode: str, needs_key: bool) -> bytes:
    """The page as it is served at `/`; `mode` is server or pool."""
    key = "needed" if needs_key else "none"
    return _styled().replace(_ROOT, f'data-mode="{mode}" data-key="{key}"').encode()


def _styled() -> str:
    """The page with its style inside, which a browser needs before it paints anything."""
    return _text("index.html").replace(_STYLE, f"<style>{_text('console.css')}</style>")


def asset(name: str) -> bytes:
    """`console.js` or `console.svg`."""
    return (script() if name == "console.js" else _text(name)).encode()


@functools.cache
def script() -> str:
    """All scripts as one, in strict mode and in a scope of their own."""
    return '"use strict";\n(() => {\n' + "".join(map(_text, SCRIPTS)) + "})();\n"


def standalone(snapshot: dict[str, Any]) -> str:
    """The page as one file that shows the timeline `snapshot` and asks nothing of any place.

    `snapshot` is trusted to be a timeline, its texts are not: they are JSON in a block that no text can end, and the
    page writes them as text. A policy in the page permits its own script and style alone.
    """
    import json  # a start does without it

    code = script()
    policy = f"default-src 'none'; script-src 'sha256-{_digest(code)}'; style-src 'sha256-{STYLE_SHA256}'"
    data = json.dumps(snapshot, separators=(",", ":")).replace("<", "\\u003c")
    html = _styled().replace(_ROOT, 'data-mode="file" data-key="none"')
    html = html.replace(_ICON, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n')
    inside = f'<script type="application/json" id="timeline">{data}</script>\n<script>{code}</script>\n'
    return html.replace(_SCRIPT, "").replace("</body>", f"{inside}</body>")


def _digest(text: str) -> str:
    import base64
    import hashlib

    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(name: str) -> str:
    # Not by pathlib or importlib.resources, which a start does without.
    with open(os.path.join(os.path.dirname(__file__), "page", name), encoding="utf-8") as file:
        return file.read()
