from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from teneral.handlers.function.context import Model
from teneral.handlers.function.handler import load_handler, run
from teneral.handlers.function.options import GenerateOptions

PAGE = (Path(__file__).parents[2] / "docs" / "handlers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# event: ([^\n]*)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_an_example_of_every_kind():
    code = [example for _, example in EXAMPLES]
    assert len(EXAMPLES) == PAGE.count("```python") >= 6
    assert any("async def" in example and "yield" in example for example in code)
    assert any("embed(" in example for example in code)


@pytest.mark.parametrize(("event", "code"), EXAMPLES)
async def test_an_example_of_the_documentation_runs(tmp_path, make_context, event, code):
    path = tmp_path / f"example_{abs(hash(code))}.py"
    path.write_text(code, encoding="utf-8")
    handler = load_handler(f"{path}:handler")
    try:
        values = [value async for value in run(handler, json.loads(event), make_context(timeout_s=60))]
    finally:
        handler.close()
    assert values
    assert all(value not in (None, "", {}) for value in values)


def test_every_option_and_call_is_documented():
    calls = [name for name in vars(Model) if not name.startswith("_")]
    for name in (*GenerateOptions.__annotations__, *calls):
        assert f"`{name}" in PAGE, name
