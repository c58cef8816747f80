"""`teneral pool run` of models that generate nothing: real packs, real servers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from tests.support.onnx_models import tabular
from tests.support.pool_runs import PoolRun
from tests.support.tiny_models import save_tiny

from teneral import cli

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]


def test_an_instance_takes_as_many_calls_at_once_as_max_concurrency_says(tmp_path: Path) -> None:
    save_tiny("bert", tmp_path / "embed")
    made = tabular()
    onnx.save(made.model, tmp_path / "table.onnx")
    assert cli.run(["pack", str(tmp_path / "table.onnx"), str(tmp_path / "table"), "--quiet"]) == 0
    kinds = {"rows": "FP32", "kind": "INT32"}
    inputs = [
        {"name": name, "datatype": kinds[name], "shape": list(rows.shape), "data": rows.ravel().tolist()}
        for name, rows in made.inputs.items()
    ]
    file = """
version = 1
[defaults]
max_instances = 1
[models.embed]
source = "embed"
[models.table]
source = "table"
[node]
memory = "8GiB"
"""
    with PoolRun(tmp_path, file) as run, ThreadPoolExecutor(32) as threads:

        def embed(number: int) -> int:
            text = "a b c " * (1 + number % 8)
            answer = run.ask("POST", "/v1/embeddings", {"model": "embed", "input": text})
            assert answer.status == 200, answer.body
            return answer.status

        assert set(threads.map(embed, range(64))) == {200}

        def infer(_: int) -> int:
            answer = run.ask("POST", "/v2/models/table/infer", {"inputs": inputs})
            assert answer.status == 200, answer.body
            return answer.status

        assert set(threads.map(infer, range(64))) == {200}
