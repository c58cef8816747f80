"""A chat with a real model: SmolLM2-135M-Instruct from the package index, packed, served, asked.

    python demo/chat.py [QUESTION ...] [--tokens N]

Without questions it reads them from the terminal, a line each, and keeps the conversation; an empty line ends it. The
server is a process of its own, started as a user would start it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator

from run import WORK, Server, stream, teneral, title
from smollm2 import gguf_file

QUESTION = "What is the capital of France, and what is it known for?"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION")
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    file = gguf_file()
    artifact = WORK / "chat"
    shutil.rmtree(artifact, ignore_errors=True)
    WORK.mkdir(exist_ok=True)

    title("1. Pack the GGUF file")
    teneral("pack", str(file), str(artifact))

    title("2. A cold start, and a chat")
    started_s = time.monotonic()
    with Server(artifact) as server:
        messages: list[dict[str, str]] = []
        for question in questions(options.questions):
            messages.append({"role": "user", "content": question})
            answer = ask(server.port, messages, options.tokens, started_s or time.monotonic())
            messages.append({"role": "assistant", "content": answer})
            started_s = 0.0
    return 0


def questions(given: list[str]) -> Iterator[str]:
    """Those of the command line; else those that are typed; one of our own where there is no terminal."""
    if not given and not sys.stdin.isatty():
        given = [QUESTION]
    if given:
        for question in given:
            print(f"> {question}")
            yield question
        return
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not question:
            return
        yield question


def ask(port: int, messages: list[dict[str, str]], tokens: int, since_s: float) -> str:
    """Stream one answer to the terminal, and return it."""
    answer, first_s, pieces = "", 0.0, 0
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
    return answer


if __name__ == "__main__":
    raise SystemExit(main())
