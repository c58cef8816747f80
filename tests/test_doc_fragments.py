"""Fragments of the documentation: commands parse, requests are answered, Python runs, data are valid."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from tests.support.adapters import save_adapter
from tests.support.doc_fragments import PAGES, ROOT, Block, commands, of_language
from tests.support.tiny_models import save_tiny, tiny_model
from tests.test_serve import Server

from teneral.cli_flags import COMMANDS, parse
from teneral.handlers import lifecycle
from teneral.handlers.platforms import resolve_settings
from teneral.handlers.pool.file import parse_pool
from teneral.runtime.config import SETTINGS

TENERAL = commands("teneral")
CURL = commands("curl")
PYTHON = of_language("python")
INLINE = [
    (str(page.relative_to(ROOT)), found)
    for page in PAGES
    for found in sorted(
        set(re.findall(r"(?<!`)`(teneral [a-z][^`\n]*)`(?!`)", page.read_text(encoding="utf-8")))
    )
]
# Checked with the programs that they need, or against what those programs publish.
ELSEWHERE = {
    "docs/engine.md": "tests/test_examples.py",
    "docs/handlers.md": "tests/handlers/test_documentation.py",
    "docs/tutorial.md": "tests/test_walkthrough.py",
    "docs/processing.md": "tests/handlers/contrib/processing/test_documentation.py",
    "docs/deploy/lambda.md": "tests/test_client.py",
    "docs/deploy/ray.md": "scripts/conformance-ray-llm: needs Ray and vLLM",
    "docs/anthropic.md": "scripts/conformance-anthropic: needs its client",
}


def parsed(words: list[str]) -> tuple[Any, str]:
    """The flags, or None and the error."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return parse(words), ""
    except SystemExit as end:
        if end.code == 0:
            return None, ""  # --help, --version
        return None, output.getvalue().strip().partition("\n")[0]


def test_there_are_fragments_of_each_kind() -> None:
    assert len(TENERAL) > 100
    assert len(CURL) > 20
    assert len(PYTHON) > 20
    assert len(INLINE) > 50


@pytest.mark.parametrize(("place", "words"), TENERAL, ids=[f"{place}-{words[1]}" for place, words in TENERAL])
def test_a_command_parses_and_its_settings_are_valid(place: str, words: list[str]) -> None:
    options, complaint = parsed(words[1:])
    assert options is not None, complaint
    if options.command == "serve":
        given = {name: value for name, value in vars(options).items() if name in SETTINGS}
        resolve_settings(given, {}, None)


def test_a_command_inside_of_a_sentence_has_known_flags() -> None:
    wrong = []
    for page, text in INLINE:
        for command in {text.replace("[", "").replace("]", ""), re.sub(r" ?\[[^\]]*\]", "", text)}:
            words = shlex.split(command.replace("…", "1"))
            _, complaint = parsed(words[1:])
            if complaint and not re.search(r"required|expected (one|at least one) argument", complaint):
                wrong.append((page, text, complaint))
    assert wrong == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("from-*.md")), ids=lambda page: page.stem)
def test_a_flag_that_takes_anothers_place_exists(page: Path) -> None:
    """In tables whose second column is Teneral's; a flag of one command stands behind the command's name."""
    names = {name.replace("_", "-") for name in SETTINGS} | {"config"}
    own = {f"--{name}" for name in names} | {f"--no-{name}" for name in names}
    wrong = []
    for cells in re.findall(r"^\|[^|]*\|([^|]*)\|", page.read_text(encoding="utf-8"), re.MULTILINE):
        for span in re.findall(r"`([^`]+)`", cells):
            if span.startswith("--"):
                wrong += [] if span.split()[0] in own else [span]
            elif span.startswith("teneral "):
                complaint = parsed(span.split()[1:])[1]
                wrong += [span] if re.search(r"unrecognized|invalid", complaint) else []
    assert wrong == []


def test_every_command_is_documented() -> None:
    documented = {words[1] for _, words in TENERAL} | {text.split()[1] for _, text in INLINE}
    assert documented >= set(COMMANDS)


@pytest.mark.parametrize("block", of_language("toml"), ids=lambda block: block.place)
def test_toml_is_valid_and_pools_are(block: Block) -> None:
    table = tomllib.loads(block.text)
    if "version" in table and "…" not in block.text:
        parse_pool(block.text, block.place)


@pytest.mark.parametrize("block", [*of_language("json"), *of_language("yaml")], ids=lambda block: block.place)
def test_json_and_yaml_are_valid(block: Block) -> None:
    if block.language == "yaml":
        assert list(yaml.load_all(block.text, _AnyTag))
        return
    try:
        json.loads(block.text)
    except ValueError:  # some keys of an object
        json.loads("{" + block.text + "}")


class _AnyTag(yaml.SafeLoader):
    """Templates of CloudFormation have tags of their own."""


_AnyTag.add_multi_constructor("!", lambda loader, tag, node: node.value)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec")


# What runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder and an adapter of it."""
    folder = tmp_path_factory.mktemp("fragments")
    save_tiny("llama", folder / "my-model")
    save_adapter(folder / "adapters" / "legal-german", tiny_model("llama"))
    save_tiny("bert", folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder / "my-model", "--name", "my-model", "--adapters", f"{folder}/adapters/{{name}}")
    yield server
    server.close()


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[Server]:
    server = Server(folder / "encoder", "--name", "my-model")
    yield server
    server.close()


@pytest.mark.parametrize(("place", "words"), CURL, ids=[place for place, _ in CURL])
def test_a_request_is_answered(place: str, words: list[str], server: Server, encoder: Server) -> None:
    """By a real server of a tiny model, which has another name than the page's."""
    (address,) = [word for word in words[1:] if re.match(r"(https?://|localhost|…/|\$URL/)", word)]
    if "runpod.io" in address or "runpod.ai" in address:
        pytest.skip("of RunPod's own API: scripts/conformance-runpod has its queue")
    path = urllib.parse.urlsplit(address if "://" in address else f"//{address}").path
    path = re.sub(r"^/v2/models/[\w-]+", "/v2/models/my-model", path)
    text = words[words.index("-d") + 1] if "-d" in words else None
    if path == "/invoke":
        pytest.skip("of a function or an ONNX model: tests/handlers/http/test_invoke.py, tests/handlers/onnx")
    if path.startswith("/v2/repository/"):
        pytest.skip("of a base and its fine-tunes: tests/handlers/platforms/kserve/test_switch.py")
    if text is None:
        status, answer = server.ask("GET", path)
    else:
        assert any(word.lower() == "content-type: application/json" for word in words)
        body = json.loads(text)
        if "model" in body:
            body["model"] = "my-model:legal-german" if ":" in body["model"] else "my-model"
        body.setdefault("max_tokens", 4) if "/chat/" in path or "/completions" in path else None
        status, answer = (encoder if "embeddings" in path else server).ask("POST", path, body)
    assert status == 200, answer


def of(page: str, word: str) -> Block:
    (block,) = [each for each in PYTHON if each.page == ROOT / page and word in each.text]
    return block


def run(block: Block, **names: Any) -> dict[str, Any]:
    exec(compile(block.text, block.place, "exec"), names)
    return names


def test_the_functions_of_the_readme_and_of_platforms_run(folder: Path, tmp_path: Path) -> None:
    from teneral import cli

    for page, event in (
        ("README.md", {"text": "Dragonflies shed their skin."}),
        ("docs/platforms.md", {"type": "a", "source": "b", "id": "1", "data": {}}),
    ):
        (tmp_path / "summarise.py").write_text(of(page, "def handler").text)
        (tmp_path / "event.json").write_text(json.dumps(event))
        command = ["invoke", f"{tmp_path}/summarise.py:handler", "--model", str(folder / "my-model")]
        assert cli.run([*command, "--event", str(tmp_path / "event.json")]) == 0


def test_any_modules_fragments_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    page = "docs/any-module.md"
    names = run(of(page, "AutoConfig"))
    assert names["tokens"].shape[1] > 3
    names = run(of(page, "def rename"), **names)
    names = run(of(page, "lm_head"), **names)
    assert float(names["norm"].detach()) > 0
    assert run(of(page, "load_file"), **names)["tensors"]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_the_readmes_module_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import teneral

    monkeypatch.chdir(folder)
    block = of("README.md", "load_into")
    local = block._replace(text=block.text.replace("s3://bucket/my-model", "my-model"))
    names = {"teneral": teneral, "torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM}
    names |= {"config": AutoConfig.from_pretrained("my-model"), "prompt": torch.tensor([[1, 2, 3]])}
    assert run(local, **names)["tokens"].shape[1] > 3


def test_a_function_takes_tritons_tensors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(of("docs/from-triton.md", "text_input").text)
    server = Server(folder / "my-model", "--handler", f"{tmp_path}/model.py:handler", "--name", "my-model")
    try:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
        status, data = server.ask("POST", "/v2/models/my-model/infer", {"inputs": [tensor]})
        assert status == 200, data
        assert json.loads(data)["outputs"][0]["name"] == "text_output"
    finally:
        server.close()


def test_a_job_from_python_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from teneral.runtime.config import ServeConfig
    from teneral.runtime.instance.instance import Instance

    monkeypatch.chdir(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line |= {"body": {"model": "my-model", "prompt": "Once", "max_tokens": 2}}
    Path("in.jsonl").write_text(json.dumps(line) + "\n")
    config = ServeConfig(model=str(folder / "my-model"), name="my-model")
    with Instance(config) as instance:
        names = run(of("docs/batch.md", "run_job"), instance=instance)
    assert names["report"].status is names["Status"].COMPLETE


def test_hooks_of_a_snapshot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = lifecycle.Hooks()
    monkeypatch.setattr(lifecycle, "HOOKS", hooks)
    names = run(of("docs/lambda.md", "before_checkpoint"))
    assert hooks.before == [names["close_connections"]]
    assert hooks.after == [names["open_them_again"]]


def test_a_draft_is_asked_for_with_openais_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused") as client:
        assert run(of("docs/draft.md", "extra_body"), client=client)["answer"].usage.completion_tokens > 0
        block = of("README.md", "extra_body")
        for line in block.text.splitlines():
            given = run(block._replace(text=f"{line}\n"))["extra_body"]
            chat: Any = {
                "model": "my-model",
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 4,
            }
            assert client.chat.completions.create(**chat, extra_body=given).choices


def test_sagemakers_call_fits_its_api() -> None:
    import boto3
    from botocore.stub import Stubber

    client = boto3.client(
        "sagemaker", region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    with Stubber(client) as stubber:
        stubber.add_response(
            "create_model", {"ModelArn": "arn:aws:sagemaker:eu-central-1:123456789012:model/x"}
        )
        role = "arn:aws:iam::123456789012:role/read-models"
        image = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/teneral:0.1.0"
        run(of("docs/platforms.md", "create_model"), sagemaker=client, role=role, image=image)


@pytest.mark.slow
def test_the_held_out_text_is_written(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "draft-quality.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    python (-c .*write_texts.*)$", page, re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "held-out.txt").stat().st_size > 1000


def test_every_python_block_runs_here_or_elsewhere() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    here = {f"{name}" for name in re.findall(r'of\("([\w./-]+\.md)"', source)}
    here |= {"docs/any-module.md", "README.md", "docs/platforms.md"}
    pages = {str(block.page.relative_to(ROOT)) for block in PYTHON}
    assert pages == here | set(ELSEWHERE)
