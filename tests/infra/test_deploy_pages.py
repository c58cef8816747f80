"""The pages of docs/deploy: a newcomer's run through each of them, with stand-ins of the platforms' tools; their pool
files render. Commands of Teneral and requests are tested with all pages' in `tests/test_doc_fragments.py`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.infra.test_deploy_scripts import SECRET, answer_as_a_platform
from tests.support.aws_commands import check_aws_command
from tests.support.fake_tools import Call, FakeTools
from tests.support.infra_validators import check_cloudformation, check_kubernetes, read_documents
from tests.support.load import patience_s

from teneral.handlers.pool.file import parse_pool
from teneral.infra.render.render import RENDERERS, render

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "deploy").glob("*.md"))
PLATFORM_PAGES = [page for page in PAGES if page.stem in RENDERERS]
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")  # a variable in front of a command
HERE_DOCUMENT = re.compile(r"<<'END'\n.*?\nEND\n", re.DOTALL)
SECTIONS = (
    "Before",
    "The first answer",
    "What it costs",
    "Forward and back",
    "Remove everything",
    "Differences",
)
# Each runs as a stand-in; a page that names another program fails.
PROGRAMS = (
    "aws",
    "curl",
    "docker",
    "gcloud",
    "helm",
    "jq",
    "kubectl",
    "openssl",
    "pip",
    "ray",
    "serve",
    "sudo",
)
TENERAL = """#!/bin/sh
case "$1 $2" in
"pool render" | "pool check") exec {python} -m teneral "$@" ;;
*) exec {recorded} "$@" ;;
esac
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each line of a page's shell blocks, with the variables that requests have."""
    text = HERE_DOCUMENT.sub("\n", "".join(blocks(page, "sh")))
    text = text.replace("$CHAT_API_KEY", "my-key").replace("$URL/", "https://chat.example.com/")
    lines = [line.removesuffix(" &") for line in text.splitlines() if line.strip()]
    indented = [
        line.strip()
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("    teneral ")
    ]
    split = [shlex.split(line, comments=True) for line in [*lines, *indented]]
    found = (
        [word for number, word in enumerate(words) if number or not ASSIGNMENT.fullmatch(word)]
        for words in split
    )
    return [words for words in found if words]


@functools.cache
def followed(page: Path) -> list[Call]:
    """All calls of a page's shell blocks, run as one script in a folder with the page's pool file, which must end well.
    `teneral pool render` is real, and so is the `deploy.sh` that it writes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = FakeTools(folder, *PROGRAMS, "teneral")
        answer_as_a_platform(tools)
        tools.answer("aws configure", "export AWS_ACCESS_KEY_ID=a\nexport AWS_SECRET_ACCESS_KEY=b\n")
        tools.answer("aws secretsmanager create-secret", SECRET)
        tools.answer("aws lambda list-versions", "1\n")
        tools.answer("gcloud run revisions list", "chat-00002\nchat-00001\n")
        tools.answer("jq|openssl", "0123456789abcdef\n")
        (folder / "recorded").mkdir()
        recorded = (tools.bin / "teneral").rename(folder / "recorded" / "teneral")
        (tools.bin / "teneral").write_text(TENERAL.format(python=sys.executable, recorded=recorded))
        (tools.bin / "teneral").chmod(0o755)
        for block in blocks(page, "toml")[:1]:
            (folder / "pool.toml").write_text(block)
        (folder / "runpod-key.txt").write_text("a-key\n")
        (folder / "page.sh").write_text("set -euo pipefail\n" + "".join(blocks(page, "sh")))
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        done = tools.run(["bash", folder / "page.sh"], cwd=folder, **keys)
        assert done.returncode == 0, done.stderr + done.stdout
        applied = " ".join(call.line for call in tools.calls())
        for document in (folder / "rendered").glob("*.yaml"):
            assert document.name in applied
        return tools.calls()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_newcomer_follows_a_page_to_its_end(page: Path) -> None:
    calls = followed(page)
    for call in calls:
        if call.words[0] == "aws":
            check_aws_command(call.words)
    if page.stem not in ("README", "helm"):
        packed = [number for number, call in enumerate(calls) if call.line.startswith("teneral pack ")]
        asked = [number for number, call in enumerate(calls) if re.match("curl|.* invoke", call.line)]
        removed = [
            number
            for number, call in enumerate(calls)
            if re.search("[dD][eE][lL][eE][tT][eE]|shutdown", call.line)
        ]
        assert packed[0] < asked[0] < removed[-1]


def test_every_platform_has_a_page_from_the_login_to_the_removal() -> None:
    assert {page.stem for page in PLATFORM_PAGES} == set(RENDERERS)
    for page in [*PLATFORM_PAGES, DOCS / "deploy" / "runpod.md"]:
        text = page.read_text(encoding="utf-8")
        headings = re.findall("^## (.*)$", text, re.MULTILINE)
        assert [title for title in headings if title in SECTIONS] == list(SECTIONS), page.name
        costs = text.partition("## What it costs")[2].partition("\n## ")[0]
        assert re.search(r"\*\*At rest\*\*.*\*\*A million tokens\*\*|As on ", costs, re.DOTALL), page.name
        assert f"({page.name})" in (DOCS / "deploy" / "README.md").read_text(encoding="utf-8")
        if page in PLATFORM_PAGES:
            assert f"teneral pool render {page.stem} " in text


@pytest.mark.parametrize("page", PLATFORM_PAGES, ids=lambda page: page.stem)
def test_a_pages_pool_file_renders_there_and_names_its_files(page):
    for block in blocks(page, "toml"):
        rendered = render(parse_pool(block, f"{page.name}"), page.stem)
        changed = [str(warning) for warning in rendered.warnings if warning.code == "W4"]
        assert all("spec.ingress of NetworkPolicy" in warning for warning in changed)  # a patch narrows it
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


@pytest.mark.parametrize("program", ["kubectl", "helm", "docker", "gcloud"])
@pytest.mark.timeout(900)
def test_a_program_knows_its_commands_and_flags(program, tmp_path):
    """Each is asked with `--help` behind its flags: an unknown command or flag is an error then, too."""
    path = os.environ.get(f"TENERAL_TEST_{program.upper()}")
    if not path and os.environ.get("TENERAL_TEST_HELM"):
        path = shutil.which(program)  # of those that are installed or not, docker and gcloud
    if not path:
        pytest.skip(f"needs {program}: scripts/conformance-infra")
    calls = {}  # one of each command with the same flags: gcloud takes seconds for each
    for page in PLATFORM_PAGES:
        for name, text in render(parse_pool(blocks(page, "toml")[0]), page.stem).texts().items():
            (tmp_path / name).write_text(text)
        for call in followed(page):
            if call.words[0] == program:
                flags = [word.partition("=")[0] for word in call.words if re.match("--?[a-z]|[a-z-]+$", word)]
                calls.setdefault(tuple(flags), call.words)
    failed = []
    for words in calls.values():
        result = subprocess.run(
            [path, *words[1:], "--help"],
            capture_output=True,
            text=True,
            timeout=patience_s(100),
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        if result.returncode != 0 or "unknown" in result.stderr.lower():
            failed.append((words, result.stderr[-300:]))
    assert calls
    assert not failed


def test_ways_into_the_cluster_are_valid():
    found = [
        each for block in blocks(DOCS / "deploy" / "kubernetes.md", "yaml") for each in read_documents(block)
    ]
    assert [each["kind"] for each in found] == ["Ingress", "HTTPRoute"]
    check_kubernetes(found)


def test_fragments_of_templates_in_other_pages_are_whole_and_valid():
    found = [block for block in blocks(DOCS / "batch.md", "yaml") if "AWSTemplateFormatVersion" in block]
    assert found
    for block in found:
        check_cloudformation(block)
