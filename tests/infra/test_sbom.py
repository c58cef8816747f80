"""The bill of materials: all that a lock file pins, all that is installed, and CycloneDX's own validator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

IMAGE = Path(__file__).parents[2] / "infra" / "image"
LOCKS = ("base", "runpod", "cuda13", "cuda13-direct")
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read())
sys.exit(str(error)[:2000] if error else 0)
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-IS", IMAGE / "sbom.py", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


def bill(*arguments: object) -> Any:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert run(*arguments).stdout == result.stdout
    return json.loads(result.stdout)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_of_a_lock_file_is_a_component_with_its_hashes(lock: str) -> None:
    text = (IMAGE / "lock" / f"{lock}.txt").read_text(encoding="utf-8")
    components = bill(IMAGE / "lock" / f"{lock}.txt")["components"]
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    assert sorted((each["name"], each["version"]) for each in components) == sorted(pins)
    hashes = [entry["content"] for each in components for entry in each["externalReferences"][0]["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:([0-9a-f]{64})", text))
    assert all(each["externalReferences"][0]["hashes"] for each in components)
    assert all(each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}" for each in components)


def test_what_is_installed_is_listed_with_the_locked_hashes() -> None:
    folder = sysconfig.get_path("purelib")
    found = bill(IMAGE / "lock" / "base.txt", "--installed", folder)
    listed = {(each["name"], each["version"]) for each in found["components"]}
    assert {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() for each in distributions(path=[folder])
    } == {name for name, _ in listed}
    refs = [each["bom-ref"] for each in found["components"]]
    assert len(refs) == len(set(refs))
    assert found["dependencies"] == [{"ref": "teneral", "dependsOn": refs}]


def test_another_lock_is_another_document() -> None:
    first, second = (bill(IMAGE / "lock" / f"{lock}.txt")["serialNumber"] for lock in LOCKS[:2])
    assert first != second


@pytest.mark.parametrize(
    "line", ["aiohttp>=3", "--index-url https://example.com", "./local.whl", f"--hash=sha256:{'0' * 64}"]
)
def test_a_line_that_pins_nothing_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text(f"{line}\n")
    assert "pin" in run(tmp_path / "lock.txt").stderr


@pytest.mark.parametrize(
    "arguments", [("base",), ("runpod",), ("base", "--installed", sysconfig.get_path("purelib"))]
)
def test_cyclonedx_takes_the_document(arguments: tuple[str, ...]) -> None:
    python = os.environ.get("TENERAL_TEST_CYCLONEDX", "")
    if not python:
        pytest.skip("needs CycloneDX's validator: scripts/conformance-infra")
    text = run(IMAGE / "lock" / f"{arguments[0]}.txt", *arguments[1:]).stdout
    result = subprocess.run([python, "-c", VALIDATE], input=text, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
