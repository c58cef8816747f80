"""The stories' pages: their commands exist, their pool file is the one in the page, and their tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.report import begin
from benchmarks.stories import aws_lambda, fine_tunes, kubernetes

from teneral.handlers.pool.file import parse_pool
from teneral.infra.render.render import render

STORIES = Path(__file__).parents[2] / "docs" / "stories"
PAGES = {"lambda.md": aws_lambda, "scale-to-zero.md": kubernetes, "fine-tunes.md": fine_tunes}
SPREAD = {"count": 10, "p50_s": 0.1, "p95_s": 0.2}
RESULTS: dict[str, dict[str, Any]] = {
    aws_lambda.NAME: {
        "frozen_s": 5.0,
        "stored_bytes": 664_000_000,
        "results": {
            aws_lambda.EXACT: {
                "init_s": 0.4,
                "first_token_s": 3.5,
                "warm_s": 0.1,
                "frozen_s": 0.2,
                "peak_bytes": 1e9,
            },
            aws_lambda.PEER: {"init_s": 9.0, "first_token_s": 9.5, "warm_s": 0.3, "peak_bytes": 1e9},
        },
    },
    kubernetes.NAME: {
        "stored_bytes": 664_000_000,
        "results": {"Knative": {"ready_s": 0.4, "token_s": 3.5, "warm_s": 0.1, "end_s": 0.1}},
    },
    fine_tunes.NAME: {
        "names": 1000,
        "rank": 4,
        "adapter_bytes": 4_400_000,
        "budget_bytes": 256 << 20,
        "requests": 600,
        "cold": {"base": 3.5, "adapter": 3.6},
        "warm": {
            "base_s": 0.06,
            "alone": {"new": SPREAD, "there": SPREAD},
            "requests_s": 10.0,
            "together": SPREAD,
            "names": 300,
            "counts": {"hits_total": 400.0, "misses_total": 200.0, "evictions_total": 140.0},
            "memory_bytes": 1e9,
            "memory_after_bytes": 1.2e9,
        },
    },
}


@pytest.mark.parametrize(("page", "module"), PAGES.items(), ids=PAGES)
def test_a_story_names_its_command_and_what_was_not_run(page: str, module: ModuleType) -> None:
    text = (STORIES / page).read_text(encoding="utf-8")
    assert f"python -m benchmarks.{module.NAME}" in text
    assert re.search(r"^## What (was not run|it does not show)$", text, re.MULTILINE)
    for clock in ("pull → token", "start → token", "wake"):
        assert f"| {clock} |" in text


@pytest.mark.parametrize("module", PAGES.values(), ids=PAGES)
def test_a_storys_figures_are_a_whole_table_with_command_and_day(module: ModuleType) -> None:
    report = begin(module.NAME, model="qwen2.5-0.5b", rounds=5, rate_mb_s=200.0, **RESULTS[module.NAME])
    text = module.section(report)
    rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) >= 3
    assert len(set(rows)) == 1
    assert f"python -m benchmarks.{module.NAME}" in text
    assert report["date"][:10] in text


def test_the_page_shows_the_pool_file_that_its_command_renders() -> None:
    page = (STORIES / "scale-to-zero.md").read_text(encoding="utf-8")
    file = kubernetes.POOL.read_text(encoding="utf-8").partition("\n")[2]
    assert f"```toml\n{file}```" in page
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    document = "\n".join(render(parse_pool(file), "knative").texts().values())
    assert shown
    for block in shown:
        for line in block.splitlines():
            assert line in document.splitlines()


@pytest.mark.parametrize("platform", ["knative", "kubernetes"])
def test_the_container_of_a_document_can_be_started_and_probed(platform: str) -> None:
    container = kubernetes.container_of(kubernetes.POOL.read_text(encoding="utf-8"), platform)
    assert container["args"] == ["serve"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"name": "TENERAL_MODEL", "value": "s3://models/packed"} in container["env"]
    assert ("startupProbe" in container) is (platform == "kubernetes")
