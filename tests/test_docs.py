"""The pages of docs/: each has a place in the site's order, and every link leads somewhere. Nothing is fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:    .*(?:\n|\Z)|\n)+")
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_REFERENCE = re.compile(r"[\w`)]\]\[([\w-]+)\]")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def places(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from places(each)


def prose(page: Path) -> str:
    """Without blocks of code, which may hold brackets of their own."""
    return _INDENTED.sub("\n", _FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """As Python-Markdown makes them of headings."""
    found = set()
    for title in _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        found.add(
            re.sub(
                r"[-\s]+",
                "-",
                re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower(),
            )
        )
    return found


def test_reference_pages_are_those_of_the_code() -> None:
    pytest.importorskip("torch", reason="some of the pages are of what needs torch")
    command = [sys.executable, "scripts/reference.py", "--check"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_every_page_has_one_place_in_the_sites_order() -> None:
    listed = Counter(places(SITE["nav"]))
    assert listed == Counter(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    inside = ROOT if page in OTHERS else DOCS  # the site holds docs/ alone
    for target in _LINK.findall(prose(page)):
        if re.match(r"(?:https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists():
            broken.append(target)
            continue
        is_lost = bool(anchor) and place.suffix == ".md" and anchor not in anchors(place)
        if is_lost or not place.is_relative_to(inside):
            broken.append(target)
    text = page.read_text(encoding="utf-8")
    broken += [name for name in _REFERENCE.findall(prose(page)) if f"\n[{name}]: " not in text]
    assert broken == []


_BENCHMARK = re.compile(r"(?:python3?|\.venv/bin/python) -m (benchmarks(?:\.\w+)*)((?: +[^`|;&)\n]+)?)")
_SCRIPT = re.compile(r"(?<![\w./-])((?:scripts|benchmarks|examples|demo|infra)/[\w./-]*\w)")
_TARGET = re.compile(r"`make ([a-z-]+)[^`]*`")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_benchmark_script_and_target_exists(page: Path) -> None:
    """Of the commands that no other test runs, since they take minutes."""
    text = re.sub(r"\n(?=\S)", " ", page.read_text(encoding="utf-8"))
    wrong = []
    for module, flags in _BENCHMARK.findall(text):
        place = ROOT.joinpath(*module.split("."))
        file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        known = file.read_text(encoding="utf-8") if file.exists() else ""
        known += (ROOT / "benchmarks" / "report.py").read_text(encoding="utf-8")
        wrong += [module] if not file.exists() else []
        wrong += [
            f"{module} {flag}" for flag in re.findall(r"(--[a-z][\w-]*)", flags) if f'"{flag}"' not in known
        ]
    wrong += [path for path in _SCRIPT.findall(text) if not (ROOT / path).exists()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    spans = {"server"}  # of the timeline, and no target
    wrong += [name for name in {*_TARGET.findall(text)} - spans if f"\n{name}:" not in makefile]
    assert wrong == []
