"""The console's files: read with their first request, or put into one page with a timeline inside.

The page is plain HTML, CSS and JavaScript without a build step. It loads nothing from another place, runs no inline
script, and learns how it is served from two attributes of its root element: `data-mode` (server, pool or file) and
`data-key` (none or needed).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib.resources import files
from typing import Any

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# In the order in which they are run: each uses names of those before it.
SCRIPTS = (
    "base.js",
    "picture.js",
    "waterfall.js",
    "start.js",
    "playground.js",
    "tokens.js",
    "kv.js",
    "load.js",
    "pool.js",
    "artifact.js",
    "main.js",
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ROOT = 'data-mode="server" data-key="none"'
_LINKS = '<link rel="icon" href="/console.svg">\n<link rel="stylesheet" href="/console.css">\n'
_SCRIPT = '<script src="/console.js" defer></script>\n'


def page(*, mode: str, needs_key: bool) -> bytes:
    """The page as it is served at `/`; `mode` is server or pool."""
    key = "needed" if needs_key else "none"
    return _text("index.html").replace(_ROOT, f'data-mode="{mode}" data-key="{key}"').encode()


def asset(name: str) -> bytes:
    """`console.css`, `console.js` or `console.svg`."""
    return (script() if name == "console.js" else _text(name)).encode()


def content_type(name: str) -> str:
    return _TYPES[name.rpartition(".")[2]]


@functools.cache
def script() -> str:
    """All scripts as one, in strict mode and in a scope of their own."""
    return '"use strict";\n(() => {\n' + "".join(map(_text, SCRIPTS)) + "})();\n"


def standalone(snapshot: dict[str, Any]) -> str:
    """The page as one file that shows the timeline `snapshot` and asks nothing of any place.

    `snapshot` is trusted to be a timeline, its texts are not: they are JSON in a block that no text can end, and the
    page writes them as text. A policy in the page permits its own script and style alone.
    """
    code, style = script(), _text("console.css")
    policy = f"default-src 'none'; script-src 'sha256-{_digest(code)}'; style-src 'sha256-{_digest(style)}'"
    data = json.dumps(snapshot, separators=(",", ":")).replace("<", "\\u003c")
    html = _text("index.html").replace(_ROOT, 'data-mode="file" data-key="none"')
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    html = html.replace(_LINKS, f"{meta}<style>{style}</style>\n")
    inside = f'<script type="application/json" id="timeline">{data}</script>\n<script>{code}</script>\n'
    return html.replace(_SCRIPT, "").replace("</body>", f"{inside}</body>")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")
