"""docs/troubleshooting.md: each message that it quotes is one of the product's."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from tests.support.doc_fragments import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("loader", "runtime", "handlers", "infra", "src/teneral")
# Between two marks stands what varies, as in `there is no model … on the Hub at …`.
MESSAGES = [
    message
    for cell in re.findall(r"^\| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for message in re.findall(r"`([^`]+)`", cell)
    if " " in message
]


def pieces_of(message: str) -> list[str]:
    return [piece.strip() for piece in message.split("…") if len(piece.strip()) > 2]


@functools.cache
def texts() -> frozenset[str]:
    """All texts of the sources that may have a message; what is computed in them is a mark."""
    begin = re.compile(
        "|".join(re.escape(piece[:12]) for message in MESSAGES for piece in pieces_of(message))
    )
    found = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            program = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(program)) if begin.search(program) else ():
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.add("".join(map(_shown, node.values)))
    return frozenset(found)


def _shown(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_the_products(message: str) -> None:
    pieces = pieces_of(message)
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    # A message may be made of two texts, such as what is wrong and what is proposed.
    whole = any(map(pattern.search, texts()))
    assert whole or all(any(piece in text for text in texts()) for piece in pieces), message
