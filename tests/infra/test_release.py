"""The way to a release: workflows call the scripts that anyone can run, and the scripts call docker as they should."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.fake_tools import FakeTools

from teneral import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DIGEST = "sha256:" + "ab" * 32
SCRIPT = re.compile(r"(?:\.ci|scripts)/[\w-]+")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def steps(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in body["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_exist_and_holds_no_secret(path: Path) -> None:
    text = path.read_text()
    body = yaml.safe_load(text)
    assert body["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert "ghcr.io/${{ github.repository }}" in text or "ghcr.io/" not in text.replace("ghcr.io --", "")
    for job in body["jobs"].values():
        assert job["timeout-minutes"] <= 120
    scripts = {name for step in steps(body) for name in SCRIPT.findall(step.get("run", ""))}
    assert scripts
    for name in scripts:
        assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_text_of_an_event_reaches_a_shell_as_a_variable_only(path: Path) -> None:
    for step in steps(yaml.safe_load(path.read_text())):
        assert "${{" not in step.get("run", "")


def test_the_test_workflow_runs_what_ci_runs() -> None:
    assert {"run": ".ci/run"} in workflow("test")["jobs"]["test"]["steps"]


def test_packages_are_published_with_an_identity_and_attestations() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "build"
    published = jobs["publish"]["steps"][-1]
    assert published["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "password" not in published.get("with", {})
    order = [str(step.get("run", step.get("uses"))) for step in jobs["build"]["steps"]]
    built = order.index("scripts/build-wheels")
    assert order.index('scripts/release-version "$TAG"') < built
    assert built < next(at for at, text in enumerate(order) if text.startswith("actions/attest"))


@pytest.fixture
def docker(tmp_path: Path) -> FakeTools:
    tools = FakeTools(tmp_path, "docker")
    tools.answer("imagetools inspect", f"{DIGEST}\n")
    tools.answer("image inspect --format", "300000000\n")
    tools.answer("image inspect --format .*python:3.12", "170000000\n")
    return tools


def build_images(tools: FakeTools, *arguments: str, **variables: str) -> Any:
    return tools.run([ROOT / "scripts" / "build-images", *arguments], cwd=ROOT, **variables)


def test_images_are_built_on_a_base_of_one_digest_and_their_sizes_are_printed(docker: FakeTools) -> None:
    done = build_images(docker)
    assert done.returncode == 0, done.stderr
    built = docker.calls("buildx build")
    assert [call.words[call.words.index("--target") + 1] for call in built] == [
        "server", "lambda", "server", "runpod",
    ]  # fmt: skip
    # buildx prints a table for any format that begins with `{{.Manifest`.
    (asked,) = docker.calls("imagetools inspect")
    assert not asked.words[-1].startswith("{{.Manifest")
    for call in built:
        assert f"BASE=python:3.12-slim-bookworm@{DIGEST}" in call.words
        assert "--load" in call.words
    assert f"teneral:{__version__}" in built[0].words
    assert f"teneral:{__version__}-lambda" in built[1].words
    assert "server: teneral:" in done.stdout
    assert "300 MB on disk, 130 MB beyond its base" in done.stdout


def test_an_image_that_grew_too_large_is_an_error(docker: FakeTools) -> None:
    docker.answer("image inspect --format .*teneral:", "400000000\n")
    done = build_images(docker, "server")
    assert done.returncode == 1
    assert "server adds 230 MB to its base, more than 150" in done.stderr
    assert build_images(docker, "ray").returncode == 0


def test_pushed_images_have_a_bill_of_materials_but_for_lambdas(docker: FakeTools) -> None:
    done = build_images(docker, "--push", "registry.example.com/teneral", "server", "lambda")
    assert done.returncode == 0, done.stderr
    server, function = docker.calls("buildx build")
    assert {"--push", "--provenance=mode=max", "--sbom=true"} <= set(server.words)
    assert {"--push", "--provenance=false", "--sbom=false"} <= set(function.words)
    assert f"server: registry.example.com/teneral:{__version__}@{DIGEST}" in done.stdout


def test_nothing_is_built_for_an_unknown_image_or_when_docker_fails(docker: FakeTools) -> None:
    assert "unknown image 'sever'" in build_images(docker, "server", "sever").stderr
    assert docker.calls() == []
    docker.answer("imagetools", status=1, stderr="no such manifest\n")
    assert "no such manifest" in build_images(docker, "server").stderr
    assert docker.calls("buildx build") == []
    docker.answer("imagetools inspect", f"{DIGEST}\n")
    docker.answer("buildx build", status=1)
    assert build_images(docker).returncode == 1
    assert len(docker.calls("buildx build")) == 1


def test_a_release_of_another_version_is_refused(tmp_path: Path) -> None:
    tools = FakeTools(tmp_path)
    script = ROOT / "scripts" / "release-version"
    assert tools.run([script, f"v{__version__}"], cwd=ROOT).stdout.strip() == __version__
    refused = tools.run([script, "v9.9.9"], cwd=ROOT)
    assert refused.returncode == 1
    assert f"tag v{__version__}" in refused.stderr
