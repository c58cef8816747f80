"""A chat with a real model over a slow link: SmolLM2-135M-Instruct, as published and packed, in a store at 50 MB/s.

    python demo/chat.py [QUESTION ...] [--tokens N]

The model comes from the package index. It is put into an S3 store on this machine, as bf16 safetensors and packed, and
started cold from both: a packed model has a third fewer bytes on the way. Then the packed one is asked more. Without
questions it reads them from the terminal, a line each, and keeps the conversation; an empty line ends it. Servers are
processes of their own, started as a user would start them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator

from run import ROOT, WORK, Server, stream, teneral, title
from smollm2 import published_folder

sys.path.append(str(ROOT))

from benchmarks.store import StoreProcess, read_once

QUESTION = "What is the capital of France, and what is it known for?"
RATE_MB_S = 50.0
Messages = list[dict[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION")
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    os.chdir(ROOT)
    bucket = WORK / "store" / "models"
    shutil.rmtree(bucket.parent, ignore_errors=True)
    bucket.mkdir(parents=True)
    shutil.copytree(
        published_folder(), bucket / "plain", copy_function=os.link
    )  # the store follows no symlinks

    title("1. Pack: once, wherever the model comes from")
    teneral("pack", str(bucket / "plain"), str(bucket / "packed"))
    read_once(bucket.parent)

    asked = questions(options.questions)
    first = next(asked, QUESTION)
    with StoreProcess(bucket.parent, rate_mb_s=RATE_MB_S, latency_ms=5) as store:
        title(f"2. A cold start from a store at {RATE_MB_S:.0f} MB/s, the files as they are published")
        started_s = time.monotonic()
        with Server("s3://models/plain", store.environment()) as server:
            _, plain_s = ask(server.port, [{"role": "user", "content": first}], options.tokens, started_s)

        title("3. The same, packed; then a chat with the warm server")
        started_s = time.monotonic()
        with Server("s3://models/packed", store.environment()) as server:
            messages: Messages = [{"role": "user", "content": first}]
            answer, packed_s = ask(server.port, messages, options.tokens, started_s)
            for question in asked:
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": question})
                answer, _ = ask(server.port, messages, options.tokens, time.monotonic())

    title("What you saw")
    for name, first_s, folder in (("published", plain_s, "plain"), ("packed", packed_s, "packed")):
        size_bytes = sum(path.stat().st_size for path in (bucket / folder).rglob("*") if path.is_file())
        wire_s = size_bytes / RATE_MB_S / 1e6
        print(
            f"  {name:10} first token {first_s:.2f} s after the process started; "
            f"its {size_bytes / 1e6:.0f} MB take {wire_s:.2f} s on the wire"
        )
    return 0


def questions(given: list[str]) -> Iterator[str]:
    """Those of the command line; else those that are typed; one of our own where there is no terminal."""
    if not given and not sys.stdin.isatty():
        given = [QUESTION]
    if given:
        yield from given
        return
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not question:
            return
        yield question


def ask(port: int, messages: Messages, tokens: int, since_s: float) -> tuple[str, float]:
    """Stream one answer to the terminal. Returns it, and the seconds from `since_s` to its first text."""
    answer, first_s, pieces = "", 0.0, 0
    print(f"> {messages[-1]['content']}\n")
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    for event in stream(port, "/v1/chat/completions", body):
        text = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        if text and not answer:
            first_s = time.monotonic() - since_s
        answer += text
        pieces += bool(text)
        print(text, end="", flush=True)
    total_s = time.monotonic() - since_s
    print(
        f"\n\n  first token after {first_s * 1e3:,.0f} ms, {pieces} pieces of text in {total_s * 1e3:,.0f} ms\n"
    )
    return answer, first_s


if __name__ == "__main__":
    raise SystemExit(main())
