"""The image's packages are enough: an environment of those that the lock pins, and no others, serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.pool_runs import PoolRun, pool_file
from tests.test_serve import Server

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "infra" / "image" / "lock"
DEMO = ROOT / "demo" / "model"
# Modules that extras bring, or that a platform's own image has.
EXTRAS = {
    "PIL", "cupy", "onnx", "onnxruntime", "opentelemetry", "pyarrow", "ray", "runpod", "starlette",
    "torch", "transformers", "triton", "vllm",
}  # fmt: skip
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import teneral
missing, num_imported = {}, 0
for module in pkgutil.walk_packages(teneral.__path__, "teneral.", onerror=lambda name: None):
    if module.name.rpartition(".")[2] == "__main__":
        continue
    try:
        importlib.import_module(module.name)
        num_imported += 1
    except ModuleNotFoundError as error:
        missing[module.name] = error.name.partition(".")[0]
    except Exception:
        pass  # not for want of a package
json.dump([num_imported, missing], sys.stdout)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment of the locked packages, in the versions of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    text = (LOCK / "base.txt").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"^([a-z0-9._-]+)==", text, re.MULTILINE))):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    (site / "code.pth").write_text(str(ROOT / "src"))
    return str(folder / "bin" / "python")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of scripts/conformance-infra are not Teneral's settings."""
    for name in [name for name in os.environ if name.startswith("TENERAL_")]:
        monkeypatch.delenv(name)


def run(python: str, *arguments: str) -> str:
    program = [python, *arguments]
    result = subprocess.run(program, capture_output=True, text=True, timeout=patience_s(120))
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("lock", ["base", "ray", "runpod", "cuda13", "cuda13-direct"])
def test_no_lock_has_the_hubs_client(lock: str) -> None:
    assert not re.search(
        r"^(huggingface-hub|hf-xet)==", (LOCK / f"{lock}.txt").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_modules_lack_no_package_but_those_of_extras(python: str) -> None:
    num_imported, missing = json.loads(run(python, "-c", IMPORT_ALL))
    assert num_imported > 400
    assert {name: package for name, package in missing.items() if package not in EXTRAS} == {}


def test_a_server_answers_texts_grammars_and_metrics(python: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = ("--name", "demo", "--chat-template", str(template))
    server = Server(DEMO, *flags, program=(python, "-m", "teneral"))
    try:
        asked = {
            "/v1/completions": {"model": "demo", "prompt": "def f", "max_tokens": 4},
            "/v1/chat/completions": {
                "model": "demo",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "one", "schema": {"type": "integer"}},
                },
            },
            "/tokenize": {"model": "demo", "prompt": "def f"},
        }
        for path, body in asked.items():
            status, answer = server.ask("POST", path, body)
            assert status == 200, (path, answer)
        status, answer = server.ask("GET", "/metrics")
        assert status == 200
        assert b"teneral_" in answer
        assert server.end() in (0, -15)
    finally:
        server.close()


def test_a_batch_job_runs(python: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "def f", "max_tokens": 3}\n')
    run(python, "-m", "teneral", "batch", str(DEMO), str(tmp_path / "in.jsonl"), str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir())


def test_a_model_is_packed(python: str, tmp_path: Path) -> None:
    run(python, "-m", "teneral", "pack", str(DEMO), str(tmp_path / "packed"))
    assert list((tmp_path / "packed").iterdir())


def test_a_pool_answers(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with PoolRun(tmp_path, pool_file(f'[models.demo]\nsource = "{DEMO}"\n')) as pool:
        answer = pool.complete("demo")
        assert answer.status == 200, answer.text()


def test_boto3_makes_clients_of_services(python: str) -> None:
    """Functions call any of them; the lock has one botocore, whose data the image keeps whole."""
    program = (
        "import boto3, json, sys; session = boto3.session.Session('a', 'b', region_name='eu-west-1'); "
        "names = ['s3', 'sts', 'sso', 'sqs', 'sns', 'dynamodb', 'secretsmanager', 'bedrock-runtime', 'events']; "
        "json.dump([session.client(name).meta.service_model.service_name for name in names], sys.stdout)"
    )
    assert len(json.loads(run(python, "-c", program))) == 9
