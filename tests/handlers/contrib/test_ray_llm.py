"""Ray Serve LLM with vLLM takes weights that stream: `scripts/conformance-ray-llm`, in an environment that has both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.ports import free_port
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

PYTHON = os.environ.get("TENERAL_TEST_RAY_LLM_PYTHON", "")
PROGRAM = (Path(__file__).parents[2] / "support" / "ray_llm_server.py").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="needs Ray and vLLM in an environment: scripts/conformance-ray-llm"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


def test_nothing_is_downloaded_and_the_weights_are_read_once(tmp_path: Path) -> None:
    plain = save_tiny("llama", tmp_path / "plain", dtype=torch.bfloat16, hidden_size=128)
    packed = tmp_path / "store" / "models" / "packed"
    pack(FileStore(plain), FileStore(packed))
    stored_bytes = sum(path.stat().st_size for path in packed.rglob("*.bin"))
    with StoreServer(tmp_path / "store") as server:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "HF_", "AWS_"))},
            "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secret",
            "HF_HOME": str(tmp_path / "hub"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        program = tmp_path / "program" / "ray_llm_server.py"
        program.parent.mkdir()
        program.write_text(PROGRAM, encoding="utf-8")
        result = subprocess.run(
            [PYTHON, program, "s3://models/packed", str(free_port())],
            env=environment,
            cwd=program.parent,
            capture_output=True,
            text=True,
            timeout=1100,
        )
        lines = [line for line in result.stdout.splitlines() if line.startswith("ANSWER ")]
        assert lines, (result.stdout + result.stderr)[-6000:]
        found = json.loads(lines[0].removeprefix("ANSWER "))
        sent = sum(entry.sent_bytes for entry in server.log() if entry.key.endswith(".bin"))
    assert found["answer"]["usage"]["completion_tokens"] == 8
    assert sent == stored_bytes
    assert not [path for path in found["cached"] if path.endswith((".bin", ".safetensors", "manifest.json"))]
