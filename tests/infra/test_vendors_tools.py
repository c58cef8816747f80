"""Rendered documents by tools that Teneral cannot install with it: `scripts/conformance-infra` brings them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.support.pool_files import PLAIN, VERSIONED, render_text

from teneral.infra.render.render import RENDERERS

ROOT = Path(__file__).parents[2]
RENDERED = ROOT / "infra" / "rendered"


def tool(name: str) -> str:
    path = os.environ.get(f"TENERAL_TEST_{name}", "")
    if not path:
        pytest.skip(f"needs {name.lower()}: scripts/conformance-infra")
    return path


def test_every_platforms_documents_are_committed():
    assert {path.name for path in RENDERED.iterdir()} == set(RENDERERS)


@pytest.mark.parametrize("file", sorted(RENDERED.glob("lambda/*.yaml")), ids=lambda path: path.name)
def test_sam_takes_a_lambda_template(file, tmp_path):
    environment = {
        **os.environ, "AWS_DEFAULT_REGION": "eu-central-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "SAM_CLI_TELEMETRY": "0", "HOME": str(tmp_path),
    }  # fmt: skip
    result = subprocess.run(
        [tool("SAM"), "validate", "--lint", "--template", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("platform", ["kubernetes", "knative", "kserve"])
def test_kustomize_takes_a_rendered_folder_as_resources(platform, tmp_path):
    for file in RENDERED.glob(f"{platform}/*.yaml"):
        shutil.copy(file, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": names, "namespace": "models"}))
    result = subprocess.run(
        [tool("KUBECTL"), "kustomize", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert len([each for each in yaml.safe_load_all(result.stdout) if each]) == len(names)


@pytest.mark.parametrize("text", [PLAIN, VERSIONED, PLAIN + '[models.m.serve]\napi_key_env = "KEY"\n'])
def test_googles_types_have_every_field_of_a_cloud_run_service(text):
    documents = [dict(document.body) for document in render_text(text, "cloud-run").documents]
    program = ROOT / "tests" / "support" / "cloud_run_types.py"
    result = subprocess.run(
        [tool("CLOUD_RUN"), program], input=json.dumps(documents), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.timeout(600)
def test_checkov_finds_nothing_that_its_file_does_not_argue():
    result = subprocess.run(
        [tool("CHECKOV"), "--config-file", ROOT / "infra" / "checkov.yaml", "--skip-download"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
