"""A whole server that computes on a device without torch, over the driver and the kernels on the CPU."""

from __future__ import annotations

import json
import signal
import sys
from operator import mul
from pathlib import Path

import pytest
import torch
from tests.support.adapters import save_adapter
from tests.support.direct_kernels import needs_double
from tests.support.tiny_models import save_tiny, tiny_model
from tests.test_serve import WAIT_S, Server

from teneral.loader.errors import UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.backends.choose import BackendChoice

pytestmark = [needs_double, pytest.mark.slow]

PROGRAM = (sys.executable, "-m", "tests.support.direct_server")
ON_DEVICE = ("--device", "cuda", "--backend", "direct")
ON_CPU = ("--device", "cpu")
SETTINGS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def answers(model: Path, *flags: str, name: str = "tiny") -> tuple[list[str], str, str]:
    """The texts for some prompts, the backend that gave them, and what the server wrote until its end. `name` may
    be an adapter's.
    """
    server = Server(model, "--name", "tiny", *flags, program=PROGRAM)
    try:
        texts = []
        for prompt in ("hello", "a longer one, of some more words", "hello"):
            status, data = server.ask(
                "POST", "/v1/completions", {**SETTINGS, "model": name, "prompt": prompt}
            )
            assert status == 200, data
            texts.append(json.loads(data)["choices"][0]["text"])
        spans = json.loads(server.ask("GET", "/timeline")[1])["spans"]
        (backend,) = [span["attributes"]["backend"] for span in spans if span["name"] == "build"]
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=WAIT_S)
        return texts, backend, rest
    finally:
        server.close()


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "cohere2", "mixtral"]
)
def test_a_server_answers_without_torch_as_the_cpu_does(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path / "plain", dtype=torch.bfloat16)
    pack(FileStore(tmp_path / "plain"), FileStore(tmp_path / "packed"), tiers=TierOptions())
    expected, _, _ = answers(tmp_path / "plain", *ON_CPU)
    found, backend, log = answers(tmp_path / "packed", *ON_DEVICE)
    assert (found, backend) == (expected, "cuda")
    assert "imported: []" in log


def embeddings(model: Path, *flags: str) -> tuple[list[list[float]], str]:
    """Those of some texts, and what the server wrote until its end."""
    server = Server(model, "--name", "tiny", *flags, program=PROGRAM)
    try:
        texts = ["hello", "a longer one, of some more words"]
        status, data = server.ask("POST", "/v1/embeddings", {"model": "tiny", "input": texts})
        assert status == 200, data
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=WAIT_S)
        return [each["embedding"] for each in json.loads(data)["data"]], rest
    finally:
        server.close()


@pytest.mark.parametrize(
    ("family", "dtype"), [("bert", torch.float32), ("xlm-roberta", torch.bfloat16)], ids=str
)
def test_a_server_embeds_without_torch_as_the_cpu_does(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path / "plain", dtype=dtype)
    pack(FileStore(tmp_path / "plain"), FileStore(tmp_path / "packed"), tiers=TierOptions())
    expected, _ = embeddings(tmp_path / "plain", *ON_CPU)
    found, log = embeddings(tmp_path / "packed", *ON_DEVICE)
    assert [sum(map(mul, *pair)) for pair in zip(found, expected, strict=True)] == pytest.approx(
        [1, 1], abs=5e-4
    )
    assert "imported: []" in log


def test_a_server_answers_with_adapters_as_the_cpu_does(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "plain", dtype=torch.bfloat16)
    save_adapter(tmp_path / "adapters" / "one", tiny_model("llama"), target_modules="all-linear")
    flags = ("--adapters", f"{tmp_path}/adapters/{{name}}")
    plain, _, _ = answers(tmp_path / "plain", *ON_CPU, *flags)
    expected, _, _ = answers(tmp_path / "plain", *ON_CPU, *flags, name="tiny:one")
    found, backend, log = answers(tmp_path / "plain", *ON_DEVICE, *flags, name="tiny:one")
    assert (found, backend) == (expected, "cuda")
    assert found != plain
    assert "imported: []" in log


def test_without_a_gpu_the_backend_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="computes on a GPU") as caught:
        BackendChoice("direct").check()
    assert "give the container a GPU" in str(caught.value.hint)
