"""The demo: pack a small model, cold-start a server, ask it something, draw the cold start, ask again while
it is warm.

    python demo/run.py [--prompt TEXT] [--tokens N]

Everything it makes lies in `.demo/`. The server is a process of its own, started as a user would start it;
the times are taken here, on the client's side of the socket.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "demo" / "model"
WORK = ROOT / ".demo"
START_TIMEOUT_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default="Return a list of the")
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()

    title("1. Pack: once, wherever the model comes from")
    teneral("pack", str(MODEL), str(WORK / "model"))
    teneral("inspect", str(WORK / "model"))

    title("2. A cold start: a new process, and a question before it has its weights")
    started_s = time.monotonic()
    with Server(WORK / "model") as server:
        cold_s = ask(server.port, options.prompt, options.tokens, started_s)
        title("3. Where the time went")
        snapshot = json.loads(fetch(server.port, "/timeline"))
        (WORK / "timeline.json").write_text(json.dumps(snapshot))
        teneral(
            "timeline", str(WORK / "timeline.json"), "--color", "always" if sys.stdout.isatty() else "never"
        )
        teneral("timeline", str(WORK / "timeline.json"), "-o", str(WORK / "timeline.html"))

        title("4. The same process, warm")
        warm_s = ask(server.port, options.prompt, options.tokens, time.monotonic())

    title("What you saw")
    print(f"  cold: {cold_s * 1e3:7,.0f} ms from starting the process to the first token")
    print(f"  warm: {warm_s * 1e3:7,.1f} ms from the request to the first token")
    print(f"  the cold start as a page: {(WORK / 'timeline.html').relative_to(ROOT)}")
    title("How to go on")
    print("  .venv/bin/teneral pack ./your-model s3://bucket/models/your-model")
    print("  .venv/bin/teneral serve s3://bucket/models/your-model")
    print("  curl localhost:8080/v1/completions -H 'content-type: application/json' \\")
    print('       -d \'{"model": "your-model", "prompt": "Return the", "max_tokens": 40}\'')
    return 0


class Server:
    """`teneral serve` in a process of its own, on a free port."""

    def __init__(self, model: Path | str, variables: Mapping[str, str] | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "teneral",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        shown = model.relative_to(ROOT) if isinstance(model, Path) else model
        print(f"$ teneral serve {shown}", flush=True)
        # A shell's own settings of Teneral are not the demo's, and without bytecode a cold start is no measure.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("TENERAL_")
        } | dict(variables or {})
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.port = self._find_port()

    def _find_port(self) -> int:
        assert self._process.stderr is not None
        log = []
        for line in self._process.stderr:
            log.append(line)
            found = re.search(r"http://[^ ]+:(\d+)", line)
            if found:
                return int(found[1])
        raise SystemExit("the server ended before it listened:\n" + "".join(log))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def ask(port: int, prompt: str, tokens: int, since_s: float) -> float:
    """Stream one completion to the terminal. Returns the seconds from `since_s` to its first text."""
    first_s = 0.0
    count = 0
    print(f"  {prompt}", end="", flush=True)
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.7,
        "top_k": 40,
        "seed": 8,
        "stream": True,
    }
    for event in stream(port, "/v1/completions", body):
        text = event["choices"][0]["text"] if event["choices"] else ""
        if text and not first_s:
            first_s = time.monotonic() - since_s
        count += bool(text)
        print(text.replace("\n", "\n  "), end="", flush=True)
    total_s = time.monotonic() - since_s
    print(
        f"\n\n  first token after {first_s * 1e3:,.0f} ms, {count} pieces of text in {total_s * 1e3:,.0f} ms"
    )
    return first_s


def stream(port: int, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise SystemExit(f"{path}: {response.status} {response.read().decode()}")
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def fetch(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    connection.request("GET", path)
    return connection.getresponse().read()


def teneral(*arguments: str) -> None:
    shown = " ".join(str(Path(a).relative_to(ROOT)) if a.startswith(str(ROOT)) else a for a in arguments)
    print(f"$ teneral {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "teneral", *arguments], check=True)


def title(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{plain}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
