"""The commands and fragments of docs/deploy: pool files render, commands are ones that their programs have. Those of
Teneral and requests are tested with all pages' in `tests/test_doc_fragments.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.aws_commands import check_aws_command
from tests.support.infra_validators import check_cloudformation
from tests.support.load import patience_s

from teneral.handlers.pool.file import parse_pool
from teneral.infra.render.render import RENDERERS, render

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "deploy").glob("*.md"))
PLATFORM_PAGES = [page for page in PAGES if page.stem in RENDERERS]
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")  # a variable in front of a command
PROGRAMS = {
    "teneral",
    "docker",
    "kubectl",
    "helm",
    "aws",
    "gcloud",
    "sam",
    "curl",
    "ray",
    "serve",
    "pip",
    "mkdir",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    indented = [
        line.strip()
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("    teneral ")
    ]
    split = [shlex.split(line, comments=True) for line in [*lines, *indented]]
    return [
        [word for number, word in enumerate(words) if number or not ASSIGNMENT.fullmatch(word)]
        for words in split
    ]


COMMANDS = [(page.stem, command) for page in PAGES for command in commands(page)]


def of(program: str) -> list[object]:
    return [
        pytest.param(command, id=f"{stem}-{command[1]}")
        for stem, command in COMMANDS
        if command[0] == program
    ]


def test_every_platform_has_a_page_that_ends_in_an_answer_and_says_what_warmth_costs():
    assert {page.stem for page in PLATFORM_PAGES} == set(RENDERERS)
    for page in PLATFORM_PAGES:
        text = page.read_text(encoding="utf-8")
        assert "## The first answer" in text
        assert "costs to hold warm" in text
        assert f"({page.name})" in (DOCS / "deploy" / "README.md").read_text(encoding="utf-8")
        assert f"teneral pool render {page.stem} " in text


def test_only_known_programs_are_used():
    assert {command[0] for _, command in COMMANDS} <= PROGRAMS


@pytest.mark.parametrize("page", PLATFORM_PAGES, ids=lambda page: page.stem)
def test_a_pages_pool_file_renders_there_and_names_its_files(page):
    for block in blocks(page, "toml"):
        rendered = render(parse_pool(block, f"{page.name}"), page.stem)
        assert not [warning for warning in rendered.warnings if warning.code == "W4"]
        for name in re.findall(r"rendered/([\w.-]+\.yaml)", page.read_text(encoding="utf-8")):
            assert name in rendered.texts()
        if page.stem in ("lambda", "sagemaker", "fargate"):
            check_cloudformation(next(iter(rendered.texts().values())))


def test_the_readmes_file_is_valid_and_its_patch_fits():
    file, patch = blocks(DOCS / "deploy" / "README.md", "toml")
    for platform in RENDERERS:
        render(parse_pool(file), platform)
    assert (
        render(parse_pool(file + patch), "knative").warnings == render(parse_pool(file), "knative").warnings
    )


@pytest.mark.parametrize("command", of("aws"))
def test_a_command_of_aws_is_in_its_api(command):
    check_aws_command(command)


@pytest.mark.parametrize("program", ["kubectl", "helm", "sam", "docker", "gcloud"])
@pytest.mark.timeout(600)
def test_a_program_knows_its_commands_and_flags(program, tmp_path):
    """Each is asked with `--help` behind its flags: an unknown command or flag is an error then, too."""
    path = os.environ.get(f"TENERAL_TEST_{program.upper()}")
    if not path and os.environ.get("TENERAL_TEST_HELM"):
        path = shutil.which(program)  # of those that are installed or not, docker and gcloud
    if not path:
        pytest.skip(f"needs {program}: scripts/conformance-infra")
    failed = []
    for stem, command in COMMANDS:
        if command[0] == program:
            for name, text in (
                render(parse_pool(blocks(DOCS / "deploy" / f"{stem}.md", "toml")[0]), stem).texts().items()
            ):
                (tmp_path / "rendered").mkdir(exist_ok=True)
                (tmp_path / "rendered" / name).write_text(text)
            asked = [path, *command[1:], "--help"]
            result = subprocess.run(
                asked,
                capture_output=True,
                text=True,
                timeout=patience_s(100),
                stdin=subprocess.DEVNULL,
                cwd=tmp_path,
            )
            if result.returncode != 0 or "unknown" in result.stderr.lower():
                failed.append((command, result.stderr[-300:]))
    assert not failed


def test_fragments_of_templates_in_other_pages_are_whole_and_valid():
    found = [block for block in blocks(DOCS / "batch.md", "yaml") if "AWSTemplateFormatVersion" in block]
    assert found
    for block in found:
        check_cloudformation(block)
