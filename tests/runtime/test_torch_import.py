"""Modules omitted from torch's import: serving does not need them, and an explicit import loads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

from teneral.runtime.torch_import import LEFT_OUT, TRIMMABLE, torch_version

SERVE = """
import json, sys
from teneral.runtime.torch_import import import_torch
trimmed = import_torch(trim={trim})
from teneral.runtime.config import ServeConfig
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.instance.instance import Instance
with Instance(ServeConfig(model={model!r}, loader="thread", backend="torch")) as instance:
    if {embeds}:
        vectors = instance.embedder.result().embed([[1, 2, 3], [4, 5]]).result()
        answer = [round(float(value), 5) for value in vectors.ravel()]
    else:
        tokens = instance.tokenizer.result().encode("a text to go on with")
        greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, top_k=20, seed=7)
        engine = instance.engine.result()
        answer = []
        for name, sampling in (("greedy", greedy), ("sampled", sampled)):
            request = GenerationRequest(name, tuple(tokens), max_tokens=12, sampling=sampling, ignore_eos=True)
            answer.append([token for event in engine.submit(request) for token in event.tokens])
print(json.dumps([trimmed, {left_out!r} in sys.modules, answer]))
"""


def served(model: Path, *, trim: bool, embeds: bool = False) -> tuple[bool, bool, object]:
    program = SERVE.format(trim=trim, model=str(model), embeds=embeds, left_out=LEFT_OUT)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(120), check=False
    )
    assert done.returncode == 0, done.stderr
    trimmed, there, answer = json.loads(done.stdout.splitlines()[-1])
    return trimmed, there, answer


@pytest.mark.skipif(torch_version() not in TRIMMABLE, reason=f"torch {torch_version()} is imported whole")
@pytest.mark.parametrize(("family", "embeds"), [("qwen2", False), ("bert", True)])
def test_a_model_answers_the_same_without_it(tmp_path: Path, family: str, embeds: bool) -> None:
    save_tiny(family, tmp_path)
    trimmed, there, answer = served(tmp_path, trim=True, embeds=embeds)
    assert trimmed
    assert not there
    assert (False, True, answer) == served(tmp_path, trim=False, embeds=embeds)


@pytest.mark.skipif(torch_version() not in TRIMMABLE, reason=f"torch {torch_version()} is imported whole")
def test_an_explicit_import_loads_it() -> None:
    program = (
        "from teneral.runtime.torch_import import import_torch\n"
        "assert import_torch(trim=True)\n"
        f"import {LEFT_OUT}, torch\n"
        "print(torch.nn.functional.linear(torch.empty(2, 3, device='meta'), torch.empty(4, 3, device='meta')).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(120), check=False
    )
    assert done.stdout.strip() == "torch.Size([2, 4])", done.stderr


def test_an_unknown_version_is_imported_whole() -> None:
    program = (
        "import sys, teneral.runtime.torch_import as module\n"
        "module.torch_version = lambda: '9.9'\n"
        "print(module.import_torch(trim=True), module.LEFT_OUT in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(120), check=False
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
