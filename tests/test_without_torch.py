"""Serving on a CPU imports and maps neither torch nor numba: decoders, encoders and classifiers, and every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.standby_processes import descendants
from tests.support.tiny_classifiers import save_classifier
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server

from teneral.loader.native.library import library
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library for this processor")

WAIT_S = 60
FORBIDDEN = re.compile(r"torch|numba|llvmlite|onnxruntime|openvino|cupy|transformers", re.IGNORECASE)
HANDLER = """
import sys

def handler(event, context):
    answer = context.model.generate("Soft wings", max_tokens=3, temperature=0).text
    return {"answer": answer, "modules": sorted(sys.modules)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny("qwen2", folder / "decoder", dtype=torch.bfloat16)
    pack(FileStore(folder / "decoder"), FileStore(folder / "packed"))
    save_tiny("bert", folder / "encoder")
    save_classifier(folder / "classifier")
    (folder / "mine.py").write_text(HANDLER)
    (folder / "scores.py").write_text(
        "def handler(event, context):\n    return context.model.classify(event)[0].tolist()\n"
    )
    return folder


@pytest.fixture(autouse=True)
def imports_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, of every process that is started here and of its children."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")


def imported(stderr: str) -> set[str]:
    """Top-level modules of a process's report."""
    lines = (
        line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")
    )
    return {line.partition(".")[0] for line in lines}


def forbidden(names: set[str]) -> list[str]:
    return sorted(name for name in names if FORBIDDEN.search(name))


def mapped(pid: int) -> set[str]:
    """Files that a process and its descendants have mapped."""
    found: set[str] = set()
    for each in (pid, *descendants(pid)):
        lines = Path(f"/proc/{each}/maps").read_text().splitlines()
        found.update(os.path.basename(line.split(maxsplit=5)[5]) for line in lines if line.count(" ") > 5)
    return found


class QuietServer(Server):
    """Whose imports are read while it runs, from a file."""

    def __init__(self, model: Path, *flags: str, log: Path) -> None:
        command = [sys.executable, "-m", "teneral", "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen([*command, *flags], stderr=file)
        deadline_s = time.monotonic() + WAIT_S
        # Its processes write to one file: the end of a line may be another's beginning.
        while (found := re.search(r"http://[^:]+:(\d+)\D", log.read_text())) is None:
            if time.monotonic() > deadline_s:
                self.close()
                pytest.fail(log.read_text()[-2_000:])
            time.sleep(0.02)
        self.port = int(found[1])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


ASKED: dict[str, tuple[str, str, Any]] = {
    "a decoder": ("decoder", "/v1/completions", {"prompt": "Soft wings", "max_tokens": 4}),
    "a packed decoder": ("packed", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "an encoder": ("encoder", "/v1/embeddings", {"input": ["soft wings", "a nymph"]}),
    "a classifier": ("classifier", "/invoke", ["soft wings", "a nymph"]),
    "a function": ("decoder", "/invoke", {}),
}
HANDLERS = {"a classifier": "scores.py", "a function": "mine.py"}


@pytest.mark.parametrize("what", ASKED)
def test_a_server_imports_and_maps_neither(folder: Path, tmp_path: Path, what: str) -> None:
    model, path, body = ASKED[what]
    flags = ["--handler", f"{folder / HANDLERS[what]}:handler"] if what in HANDLERS else []
    server = QuietServer(folder / model, *flags, log=tmp_path / "log")
    try:
        status, answer = server.ask("POST", path, body)
        assert status == 200, answer
        maps = mapped(server.process.pid)
        assert any("teneral_" in name for name in maps), "the native library is not there"
        assert forbidden(maps) == []
        modules = imported(server.log.read_text())
        assert {"numpy", "teneral"} <= modules
        assert forbidden(modules) == []
        if what == "a function":
            assert forbidden(set(json.loads(answer)["modules"])) == []
    finally:
        server.close()


def test_neither_does_an_invocation(folder: Path, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text("{}")
    done = run(
        "invoke", f"{folder / 'mine.py'}:handler", "--model", str(folder / "packed"), "--event", str(event)
    )
    reply = json.loads(done.stdout)
    assert isinstance(reply["answer"], str)
    assert forbidden(set(reply["modules"])) == []
    assert forbidden(imported(done.stderr)) == []


def test_neither_does_a_batch_job(folder: Path, tmp_path: Path) -> None:
    lines = [{"custom_id": str(number), "prompt": "Soft wings", "max_tokens": 3} for number in range(3)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("batch", str(folder / "decoder"), str(source), str(tmp_path / "out.jsonl"), "--quiet")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    assert {"numpy", "teneral"} <= imported(done.stderr)
    assert forbidden(imported(done.stderr)) == []


def test_neither_do_calibration_and_evaluation(folder: Path, tmp_path: Path) -> None:
    original, artifact = str(folder / "decoder"), str(tmp_path / "int4")
    packing = ["pack", original, artifact, "--quantize", "int4", "--int8", "q", "--calibrate-tokens", "64"]
    for arguments in (
        packing,
        ["eval", artifact, "--against", original, "--max-tokens", "64"],
        ["eval-draft", str(folder / "packed"), "--max-tokens", "64"],
    ):
        done = run(*arguments, "--quiet")
        assert "not calibrated" not in done.stderr
        assert forbidden(imported(done.stderr)) == []


def test_torch_is_imported_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    server = QuietServer(folder / "decoder", "--backend", "torch", log=tmp_path / "log")
    try:
        assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert "torch" in imported(server.log.read_text())
        assert any("libtorch" in name for name in mapped(server.process.pid))
    finally:
        server.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teneral", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done
