"""The bounds of decision 0048: no file of more than 500 lines, no function of more than 100."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("handlers", "runtime", "loader", "infra", "src/teneral", "tests")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100


def programs() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in programs()}
    assert len(lengths) > 500
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in programs()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
