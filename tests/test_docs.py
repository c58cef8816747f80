"""The pages of docs/: each has a place in the site's order, and every link leads somewhere. Nothing is fetched."""

from __future__ import annotations

import functools
import json
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
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
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
    """The anchors that Python-Markdown makes of headings."""
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


# Figures

# What the pages of figures are made of; a decision keeps the figures of its day.
FIGURES = [page for page in [*PAGES, ROOT / "README.md"] if "decisions" not in page.parts]
_MARKED = re.compile(r"<!--=[\w.-]+-->.*?<!--/-->", re.DOTALL)
_TABLES = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
_MEASURED = re.compile(r"(?<![\w.])\d+\.\d\d+ (?:ms|s|GB/s|MB/s|CPU-s)(?![\w/])")
_RUN = re.compile(r"\b20\d\d-\d\d-\d\d\b|<!--=[\w-]+\.day-->")
# The benchmarks whose tables benchmarks.md has.
_TABLED = {"cold_start", "starts", "standby", "draft", "prefix"}


def test_figures_are_those_of_the_latest_results() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.readme", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_begins_with_a_named_figure(page: Path) -> None:
    """A comment at the beginning of a line would end its paragraph in the site."""
    assert re.findall(r"^ *<!--=.*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_measured_figure_names_its_run(page: Path) -> None:
    """A section with a time or a rate of two decimals and more has the day of its measurement, too."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    sections = re.split(r"^(?=#{1,6} )", text, flags=re.MULTILINE)
    nameless = [found[0] for part in sections if not _RUN.search(part) for found in _MEASURED.finditer(part)]
    assert nameless == []


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_of_a_table_is_copied_by_hand(page: Path) -> None:
    """`benchmarks.readme` writes the first tokens of benchmarks.md, of now and before, into other pages."""
    if page.name == "benchmarks.md":
        return
    text = _TABLES.sub("", _MARKED.sub("", _FENCED.sub("", page.read_text(encoding="utf-8"))))
    assert sorted(set(re.findall(r"(?<![\d.])\d+\.\d\d s\b", text)) & first_tokens()) == []


def test_a_comparisons_figures_of_a_gpu_are_those_of_its_page() -> None:
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    gpu = (DOCS / "gpu.md").read_text(encoding="utf-8")
    row = page.split("| InstantTensor |")[1].splitlines()[2]
    found = [*re.findall(r"[\d.]+", row), *re.findall(r"([\d,]+) tokens/s|and ([\d,]+) with", page)]
    figures = ["".join(figure) for figure in found]
    assert len(figures) == 8
    assert [
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", gpu)
    ] == []


@functools.cache
def first_tokens() -> frozenset[str]:
    """Those of two seconds and more, which are hardly equal by chance."""
    reports = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    times = [time_s for report in reports if report["benchmark"] in _TABLED for time_s in _times(report)]
    return frozenset(f"{time_s:.2f} s" for time_s in times if time_s >= 2)


def _times(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        if isinstance(value.get("first_token_s"), float):
            yield value["first_token_s"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _times(each)


def test_a_search_finds_tasks_before_decisions() -> None:
    assert "meta" in SITE["plugins"]
    meta = yaml.safe_load((DOCS / "decisions" / ".meta.yml").read_text(encoding="utf-8"))
    assert meta["search"]["boost"] < 0.1  # titles count a thousand times as much as texts
