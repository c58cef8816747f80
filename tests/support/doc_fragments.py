"""Fragments of documentation pages: fenced blocks by language, and the shell commands of all blocks."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Records of decisions keep the commands of their day.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"),
]
_FENCE = re.compile(r"^ *```(\w*)")
_SHELL = {"", "sh", "console", "text"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_OPTIONAL = re.compile(r" ?\[([^\[\]]*)\]")
# A synopsis explains its commands behind two spaces or more, other lines behind a #.
_DESCRIPTION = re.compile(r" (?:#| +(?=[^\s\-'\"\\])).*")
_COMMAND = re.compile(r"(?:\$ )?((?:[A-Z_]+=\S* )*(?:teneral|curl) .*)", re.DOTALL)
_ALTERNATIVES = re.compile(r"[\w-]+(?:\|[\w-]+)+")


class Block(NamedTuple):
    """One block of code. `line` is that of its first line, from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and those indented by four spaces, whose language is empty."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        if fence := _FENCE.match(lines[number]):
            end = next(place for place in range(number + 1, len(lines)) if lines[place].strip() == "```")
            yield Block(page, number + 2, fence[1], "\n".join(lines[number + 1 : end]) + "\n")
            number = end + 1
        elif lines[number].startswith("    ") and number and not lines[number - 1].strip():
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = "\n".join(line[4:] for line in lines[number:end])
            yield Block(page, number + 1, "", text.rstrip() + "\n")
            number = end
        else:
            number += 1


def of_language(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """The place and the words of each command of a program, without variables before it and comments behind it. A
    synopsis gives one for each of its alternatives, and one with and one without all that is optional.
    """
    found = []
    for block in itertools.chain.from_iterable(map(blocks, PAGES)):
        if block.language not in _SHELL:
            continue
        for number, command in _whole_lines(block.text):
            if begin := _COMMAND.match(command):
                place = f"{block.page.relative_to(ROOT)}:{block.line + number}"
                found += [
                    (place, words) for words in _meant(begin[1].removesuffix(" &")) if words[0] == program
                ]
    return found


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a shell with those that they go on in: behind a backslash, or inside of quotes."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, command = number, lines[number]
        if _COMMAND.match(command) and _is_whole(_DESCRIPTION.sub("", command)):
            command = _DESCRIPTION.sub("", command)
        while _COMMAND.match(command) and number + 1 < len(lines) and not _is_whole(command):
            number += 1
            command = command.removesuffix("\\") + "\n" + lines[number]
        yield first, command
        number += 1


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\")


def _meant(command: str) -> Iterator[list[str]]:
    both = {command}
    if not re.search(r"['\"]", command):
        both = {_OPTIONAL.sub("", command), _OPTIONAL.sub(r" \1", command)}
    for each in sorted(both):
        words = shlex.split(each, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        choices = [word.split("|") if _ALTERNATIVES.fullmatch(word) else [word] for word in words]
        for chosen in itertools.product(*choices):
            yield list(chosen)
