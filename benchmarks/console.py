"""The console: its first paint, its bytes, what it explains of a start's time, and what it costs the first token.

    python -m benchmarks.console [--rounds 5] [--rate 200] [--only PATTERN] [--save]

Needs Chromium, and Playwright in `.conformance-console`, which `scripts/conformance-console` puts there.

    paint       a browser that is running already goes to the page as soon as the port is open: until the first paint
                with content, counted from the timeline's mark `port open`; next to it the end of its span `start
                server`, from which on the web server reads requests, and a paint of the server once it has started
    explained   cold starts with one request: the share of the time to its first token that the page explains
    token       the same starts in turns with --no-console; with a console that no client asks; with the requests that
                the page makes, from another process; and with the page in Chromium, which has the same cores: until
                the first token
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import cold_starts
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import selected
from benchmarks.server import Server, free_port
from benchmarks.store import StoreProcess, prepare, warm

from teneral.handlers.console.files import PATHS, standalone
from teneral.runtime.waterfall.command import checked_snapshot

DEMO = Path(__file__).parent.parent / "demo" / "model"
TOOLS = Path(__file__).parent.parent / ".conformance-console"
GOALS = {"paint_ms": 100, "page_bytes": 150_000, "explained": 0.98, "token": 0.01}
PAINT = "port open → first paint"
OFF = "no console"
COMPANIES = ("a console not asked", "the page's requests", "the page in Chromium")
# What the page asks for: its files, then the timeline as it grows, and the metrics.
READER = """
import http.client, sys, time
port = int(sys.argv[1])
def get(path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    response = connection.getresponse()
    while response.read1(65536):
        pass
print("here", flush=True)  # its own start is not to take the server's cores
while True:
    try:
        get("/"); break
    except OSError:
        time.sleep(0.01)
for path in ("/console.js", "/timeline/events"):
    get(path)
"""


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or not (TOOLS / "playwright").is_dir():
        raise SystemExit("needs Chromium and Playwright: run scripts/conformance-console")
    sys.path.append(str(TOOLS))
    from playwright.sync_api import sync_playwright

    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin("console", model=options.like, rounds=options.rounds, rate_mb_s=options.rate, goals=GOALS)
    with (
        StoreProcess(root, rate_mb_s=options.rate, latency_ms=15.0) as store,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        _paint(browser, str(DEMO))  # the browser's own first page
        models = {
            "demo": (str(DEMO), {}),
            f"{options.like}, local": (str(root / "models" / "plain"), {}),
            f"{options.like}, S3": ("s3://models/packed", store.environment()),
        }
        models = selected(models, options.only)
        report["page_bytes"] = _page_bytes()
        report["paint"] = [_paint(browser, str(DEMO)) for _ in range(options.rounds)]
        report["starts"] = {
            name: _starts(browser, model, variables, options.rounds, lambda: warm(root))
            for name, (model, variables) in models.items()
        }
        browser.close()
    finish(report, render(report), save=options.save)


def _paint(browser: Any, model: str) -> dict[str, float]:
    """Milliseconds to the first paint with content, of a starting server and then of the same."""
    page = browser.new_page()
    found = {}
    try:
        with Server(model) as server:
            _wait_for_port(server.port)
            page.goto(server.url, wait_until="load")
            painted_ms, marks = _first_paint(page), _process_spans(server.port)
            opened_ms = 1000 * (marks["started_unix_s"] + marks["port open"])
            found[PAINT] = painted_ms - opened_ms
            found["port open → the web server reads requests"] = (
                1000 * (marks["started_unix_s"] + marks["start server"]) - opened_ms
            )
            server.wait_ready()
            asked_ms = 1000 * time.time()
            page.goto(server.url + "/?again", wait_until="load")
            found["a ready server is asked → first paint"] = _first_paint(page) - asked_ms
    finally:
        page.close()
    return found


def _wait_for_port(port: int) -> None:
    """Return within a millisecond or so of its opening."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.001)
    raise SystemExit("the server's port did not open")


def _first_paint(page: Any) -> float:
    """In milliseconds since 1970, on this machine's clock."""
    # Not `wait_for_function`, whose polling the page's content security policy refuses.
    while not page.evaluate("performance.getEntriesByName('first-contentful-paint').length"):
        page.wait_for_timeout(20)
    script = "performance.timeOrigin + performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(page.evaluate(script))


def _process_spans(port: int) -> dict[str, float]:
    """The ends of the process's spans, in seconds since its start, and that start."""
    timeline = json.loads(_get(port, "/timeline"))
    ends = {span["name"]: span["end_s"] for span in timeline["spans"] if span["lane"] == "process"}
    return {**ends, "started_unix_s": timeline["started_unix_s"]}


def _page_bytes() -> int:
    with Server(str(DEMO)) as server:
        server.wait_ready()
        return sum(len(_get(server.port, path)) for path in PATHS)


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def _starts(
    browser: Any, model: str, variables: Mapping[str, str], rounds: int, before: Any
) -> dict[str, list[float]]:
    """First tokens in turns, and what the page explains of the starts without it."""
    found: dict[str, list[float]] = {row: [] for row in (OFF, *COMPANIES, "explained")}
    for _ in range(rounds):
        for row, company in ((OFF, _alone), *zip(COMPANIES, (_alone, _reader, _page), strict=True)):
            before()
            port = free_port()
            flags = ("--no-console",) if row == OFF else ()
            with company(browser, port):
                start = cold_starts.serve(model, *flags, variables=variables, wants_timeline=True, port=port)
            found[row].append(start.first_token_s)
            note(f"{row:20} {start.first_token_s:.3f} s")
            if row == OFF:
                found["explained"].append(_explained(browser, start.timeline))
                note(f"explained            {found['explained'][-1]:.3f}")
    return found


@contextmanager
def _alone(browser: Any, port: int) -> Iterator[None]:
    yield


@contextmanager
def _reader(browser: Any, port: int) -> Iterator[None]:
    command = [sys.executable, "-c", READER, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _page(browser: Any, port: int) -> Iterator[None]:
    """The page is opened as soon as the port is: by a page that tries."""
    page = browser.new_page()
    script = f"""
        const open = () => fetch('http://127.0.0.1:{port}/livez', {{mode: 'no-cors'}})
            .then(() => {{ location.href = 'http://127.0.0.1:{port}/'; }}, () => setTimeout(open, 10));
        open();
    """
    page.evaluate(script)
    try:
        yield
    finally:
        page.close()


def _explained(browser: Any, timeline: Any) -> float:
    """The share of the start that the page explains for this timeline."""

    page = browser.new_page()
    try:
        page.set_content(standalone(checked_snapshot(timeline)))
        text = page.locator("#explained p").text_content()
    finally:
        page.close()
    found = re.search(r"([\d.]+) ?%", text)
    if found is None:
        raise SystemExit(f"the page says: {text}")
    return float(found[1]) / 100


def render(report: Mapping[str, Any]) -> str:
    """The report as tables for people."""
    goals, paint = report["goals"], report["paint"]
    rows = [["page", f"{report['page_bytes']:,} bytes", f"at most {goals['page_bytes']:,}"]]
    rows += [
        [
            name,
            f"{statistics.median(each[name] for each in paint):.0f} ms",
            f"{goals['paint_ms']} ms" if name == PAINT else "",
        ]
        for name in paint[0]
    ]
    for name, found in report["starts"].items():
        share = statistics.median(found["explained"])
        rows.append([f"{name}: explained", f"{share:.1%}", f"{goals['explained']:.0%}"])
        rows.append([f"{name}: first token with --no-console", f"{statistics.median(found[OFF]):.3f} s", ""])
        for row in COMPANIES:
            pairs = zip(found[row], found[OFF], strict=True)
            ratio = statistics.median(own / other for own, other in pairs)
            rows.append([f"{name}: with {row}", f"{ratio:.3f}x", f"within {goals['token']:.0%}"])
    words = [report["model"], f"{report['rounds']} rounds"]
    return "\n".join([title(report, "console", *words), table(["", "measured", "goal"], rows)])


if __name__ == "__main__":
    main()
