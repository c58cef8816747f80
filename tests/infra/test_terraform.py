"""Terraform modules over the rendered documents: each name in them is declared, examples fit their modules, and a real
terraform applies them with providers that only pretend to (`scripts/conformance-infra`, where terraform is installed).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.load import patience_s

ROOT = Path(__file__).parents[2]
TERRAFORM = ROOT / "infra" / "terraform"
MODULES = ("lambda", "fargate", "cloud-run")
PROGRAM = os.environ.get("TENERAL_TEST_TERRAFORM", "")
PLUGINS = os.environ.get(
    "TENERAL_TEST_TERRAFORM_PLUGINS", ""
)  # a folder of providers; else they are downloaded
FILES = [TERRAFORM / folder / name / "main.tf" for folder in ("", "examples") for name in MODULES]
needs_terraform = pytest.mark.skipif(not PROGRAM, reason="needs terraform: scripts/conformance-infra")
PRETENDED = """
mock_provider "aws" {
  mock_resource "aws_cloudformation_stack" {
    defaults = { outputs = { Function = "chat-Function-a1", Url = "https://a.example.com" } }
  }
}
run "apply" {
  command = apply
  assert {
    condition     = keys(output.urls) == ["chat", "embed"]
    error_message = "each model has a stack"
  }
}
"""


def declared(path: Path) -> dict[str, Any]:
    """Names by kind of block. A name that is declared is quoted in some versions of the parser."""
    hcl2 = pytest.importorskip("hcl2", reason="needs python-hcl2")
    found: dict[str, dict[str, Any]] = {}
    for kind, blocks in hcl2.loads(path.read_text()).items():
        for block in blocks if isinstance(blocks, list) else [blocks]:
            for name, body in block.items():
                found.setdefault(kind, {})[str(name).strip('"')] = body
    return found


def resources(path: Path) -> set[str]:
    return {
        f"{kind}.{str(name).strip(chr(34))}"
        for kind, body in declared(path).get("resource", {}).items()
        for name in body
        if not str(name).startswith("__")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TERRAFORM).parent))
def test_every_name_is_declared_and_used(path: Path) -> None:
    found, text = declared(path), re.sub("#.*", "", path.read_text())
    for kind, prefix in (("variable", "var"), ("locals", "local"), ("module", "module")):
        names = {name for name in found.get(kind, {}) if not name.startswith("__")}
        used = set(re.findall(rf"(?<![\w.]){prefix}\.(\w+)", text))
        assert used == names, f"{path}: {kind}"
    used = set(re.findall(r"(?<![\w.\"/])((?:aws|google)_\w+\.\w+)", text))
    assert used <= resources(path)


@pytest.mark.parametrize("name", MODULES)
def test_an_example_gives_what_its_module_takes(name: str) -> None:
    example = TERRAFORM / "examples" / name / "main.tf"
    (module,) = declared(example)["module"].values()
    given = {key: str(value).strip('"') for key, value in module.items() if not key.startswith("__")}
    path = (example.parent / given.pop("source")).resolve() / "main.tf"
    assert path == TERRAFORM / name / "main.tf"
    variables = {key: value for key, value in declared(path)["variable"].items() if not key.startswith("__")}
    needed = {key for key, value in variables.items() if "default" not in value}
    assert needed <= set(given) <= set(variables)
    rendered = given["rendered"].replace("${path.module}", str(example.parent))
    assert (ROOT / "infra" / "rendered" / name).samefile(rendered)
    outputs = set(re.findall(r"module\.models\.(\w+)", example.read_text()))
    assert outputs <= set(declared(path)["output"])


def terraform(*arguments: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run(
        [PROGRAM, *arguments],
        cwd=folder,
        env={**environment, "CHECKPOINT_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=patience_s(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_terraform
def test_terraform_formats_nothing() -> None:
    terraform("fmt", "-check", "-recursive", "-diff", ".", folder=TERRAFORM)


@needs_terraform
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lambda", "fargate"])
def test_terraform_applies_an_example_with_a_provider_that_pretends(name: str, tmp_path: Path) -> None:
    for each in ("terraform", "rendered"):
        shutil.copytree(ROOT / "infra" / each, tmp_path / "infra" / each)
    folder = tmp_path / "infra" / "terraform" / "examples" / name
    plugins = [f"-plugin-dir={PLUGINS}"] if PLUGINS else []
    try:
        terraform("init", "-backend=false", "-input=false", *plugins, folder=folder)
    except AssertionError as error:
        if PLUGINS or "Failed to query available provider packages" not in str(error):
            raise
        pytest.skip("the provider of AWS is neither here nor downloadable: TENERAL_TEST_TERRAFORM_PLUGINS")
    terraform("validate", folder=folder)
    (folder / "pretended.tftest.hcl").write_text(PRETENDED)
    assert "1 passed, 0 failed" in terraform("test", "-no-color", folder=folder)
    lines = (folder / "main.tf").read_text().splitlines(keepends=True)
    (folder / "main.tf").write_text("".join(line for line in lines if "secret_arn" not in line))
    with pytest.raises(AssertionError, match="chat has secret settings: set secret_arn"):
        terraform("test", "-no-color", folder=folder)


@needs_terraform
def test_terraform_reads_cloud_runs_documents(tmp_path: Path) -> None:
    """The module's values, without its provider."""
    text = (TERRAFORM / "cloud-run" / "main.tf").read_text()
    kept = re.findall(r"^(?:variable|locals)\b.*?^}\n", text, re.MULTILINE | re.DOTALL)
    names = ("specs", "plain", "secrets", "readers", "keyed")
    kept += [f'output "{name}" {{\n  value = local.{name}\n}}\n' for name in names]
    (tmp_path / "main.tf").write_text("\n".join(kept))
    given = {
        "rendered": str(ROOT / "infra" / "rendered" / "cloud-run"),
        "project": "my-project",
        "region": "europe-west3",
        "buckets": ["models"],
    }
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(given))
    terraform("init", "-backend=false", "-input=false", folder=tmp_path)
    terraform("apply", "-auto-approve", "-no-color", folder=tmp_path)
    found = {
        name: each["value"]
        for name, each in json.loads(terraform("output", "-json", folder=tmp_path)).items()
    }
    assert set(found["specs"]) == {"chat", "embed"}
    assert found["keyed"] == {"chat chat-api-key": {"model": "chat", "secret": "chat-api-key"}}
    assert set(found["readers"]) == {"chat models", "embed models"}
    document = yaml.safe_load((ROOT / "infra" / "rendered" / "cloud-run" / "chat.service.yaml").read_text())
    variables = document["spec"]["template"]["spec"]["containers"][0]["env"]
    plain = {each["name"]: each["value"] for each in variables if "value" in each}
    assert found["plain"]["chat"] == plain
    assert found["secrets"]["chat"] == {"TENERAL_API_KEY": "chat-api-key"}


@pytest.mark.parametrize("platform", ["cloud-run"])
def test_the_module_sets_every_field_of_a_rendered_document(platform: str) -> None:
    """One that the renderer adds must be added to the module, too."""
    text = (TERRAFORM / platform / "main.tf").read_text()

    def fields(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(fields, value.values()))
        return set().union(*map(fields, value)) if isinstance(value, list) else set()

    document = yaml.safe_load((ROOT / "infra" / "rendered" / platform / "chat.service.yaml").read_text())
    # Those below are given whole.
    whole = {"annotations", "labels", "limits", "apiVersion", "kind"}
    names = fields(_without(document, whole)) - whole
    missing = {name for name in names if name not in text and _snake(name) not in text}
    assert missing == set()


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name)
