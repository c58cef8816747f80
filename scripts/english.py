"""Private words and riddles of each top folder, counted against a ceiling that may only fall.

Private words read as if translated (CONTRIBUTING.md); they count in prose, messages, identifiers and file names. A
riddle is a docstring that begins with a question word, or with "As", where a noun phrase belongs. `english.json` holds
the ceilings: `--lower` writes today's counts there and raises none, `--list FOLDER` shows each place.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = Path(__file__).with_suffix(".json")
KINDS = (
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".tpl",
    ".html",
    ".c",
    ".h",
    ".cu",
    ".sh",
    "Makefile",
    "Dockerfile",
)
# `quality/text.py` holds a story that models read: the figures of docs/draft-quality.md are for its exact words.
OWN = ("scripts/english.py", "tests/test_english.py", "runtime/quality/text.py")

WORDS = (
    *("nobody", "whoever", "who asks", "beside", "so many", "told", "said", "what stands", "be meant"),
    *("those who", "all who", "who waits", "who computes"),
)
_GAP = r"(?:_|[\s#]+)"  # of an identifier, or of a comment that goes on in its next line
PRIVATE = re.compile(rf"(?i:(?<![a-z])(?:{'|'.join(word.replace(' ', _GAP) for word in WORDS)})(?![a-z]))")
RIDDLE = re.compile(r"(?:What|Who|Whose|Which|Where|Whether|As)\b")


def private_words(text: str) -> list[int]:
    """The lines, counted from 1, on which private words begin."""
    return [text.count("\n", 0, match.start()) + 1 for match in PRIVATE.finditer(text)]


def riddles(program: str, *, of_modules: bool = False) -> list[int]:
    """The lines on which docstrings, or those of modules alone, begin with a question word."""
    kinds = (ast.Module,) if of_modules else (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, kinds)]
    return [node.body[0].lineno for node in nodes if RIDDLE.match(ast.get_docstring(node) or "")]


def folder_of(path: str) -> str:
    """The top folder that a file counts for; the files above all folders share `.`."""
    return path.partition("/")[0] if "/" in path else "."


def places() -> list[str]:
    """`FILE:LINE` of each private word and each riddle in the files that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    found = []
    for path in listed.stdout.splitlines():
        file = ROOT / path
        if not (path.endswith(KINDS) or path.startswith("scripts/")) or path in OWN or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        lines = private_words(text) + [0] * len(private_words(path))
        if path.endswith(".py"):
            lines += riddles(text, of_modules=path.startswith("tests/"))
        found += [f"{path}:{line}" for line in sorted(lines)]
    return found


def main(arguments: list[str]) -> int:
    found = places()
    if arguments[:1] == ["--list"]:
        print(*(place for place in found if folder_of(place) in arguments[1:]), sep="\n")
        return 0
    counts = Counter(map(folder_of, found))
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    if arguments == ["--lower"]:
        lowered = {folder: min(ceiling, counts[folder]) for folder, ceiling in ceilings.items()}
        CEILINGS.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
    above = {folder: count for folder, count in sorted(counts.items()) if count > ceilings.get(folder, 0)}
    for folder, count in above.items():
        print(
            f"{folder}: {count} private words and riddles, {ceilings.get(folder, 0)} allowed; "
            f"see them with `python scripts/english.py --list {folder}`"
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
