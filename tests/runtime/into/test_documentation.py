from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.any_modules import ARCHITECTURES
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

import teneral

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "any-module.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_run_one_after_another(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path / "my-model", dtype=torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "any-module.md", "exec"), names)
    assert len(EXAMPLES) == PAGE.count("```python") == 4
    assert names["tokens"].shape == (1, 7)
    assert names["norm"] > 0
    assert torch.equal(names["tensors"]["lm_head.weight"], names["model"].lm_head.weight)


def test_the_reference_names_what_there_is_to_call():
    reference = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in teneral.__all__:
        if inspect.isfunction(getattr(teneral, name)) or name.endswith("Engine"):
            assert f"teneral.{name}\n" in reference


def test_the_page_lists_the_architectures_that_are_tested_and_no_others():
    listed = re.search(r"^Tested, .*?: (.*?)\.\s", PAGE, re.DOTALL | re.MULTILINE)
    assert listed is not None
    names = {name.strip("`") for name in re.split(r",\s+(?:and\s+)?|\s+and\s+", listed.group(1))}
    own = {"torch transformer": "torch.nn.Transformer", "convolutional": "a convolutional network of our own"}
    assert names == {own.get(each.name, each.name) for each in ARCHITECTURES}


@pytest.mark.slow
def test_the_example_runs():
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "any_module.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience_s(100),
    )
    assert [line.split("  ")[0] for line in result.stdout.splitlines()][1:] == [
        "first output",
        "everything is there",
    ]
