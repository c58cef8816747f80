"""docs/processing.md: its examples run, and it names what is public."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_imports import HEAVY

from teneral.handlers.contrib import processing
from teneral.handlers.function.handler import load_handler, run

PAGE = (Path(__file__).parents[4] / "docs" / "processing.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# event: ([^\n]*)\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_has_an_event():
    assert len(EXAMPLES) == PAGE.count("```python") >= 6


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


def test_every_public_name_exists_and_is_documented():
    for name in processing.__all__:
        assert getattr(processing, name).__name__ == name
    documented = {
        name for name in processing.__all__ if not (name[0] == "a" and name[1:] in processing.__all__)
    }
    assert [name for name in sorted(documented - {"Chunker"}) if f"{name}" not in PAGE] == []
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        processing.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import teneral.handlers.contrib.processing",
        "import teneral.handlers.contrib.processing.objects, teneral.handlers.contrib.processing.objects",
        "from teneral.handlers.contrib import processing; [getattr(processing, name) for name in processing.__all__]",
        "import teneral.handlers.contrib.examples.summarise_upload, teneral.handlers.contrib.examples.embed_batch",
    ],
)
def test_importing_brings_no_library_along(statement):
    program = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    unwanted = {
        "torch",
        "numpy",
        "PIL",
        "pyarrow",
        "boto3",
        "botocore",
        "aiohttp",
        "tokenizers",
        "transformers",
    }
    assert not set(output.split()) & unwanted
    assert unwanted - {"PIL", "pyarrow"} <= HEAVY
