"""vLLM itself, with our loader and with its own: equal greedy tokens, alone and with two tensor-parallel workers.

vLLM pins what it needs, so it has an environment of its own, which scripts/conformance-vllm makes (of the build for
CPUs); TENERAL_TEST_VLLM_PYTHON names its Python. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.support.load import patience_s
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny
from tests.support.vllm_generation import NUM_TOKENS, PROMPTS

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

PYTHON = os.environ.get("TENERAL_TEST_VLLM_PYTHON", "")
# Started where it stands, its neighbours would hide modules of the standard library.
PROGRAM = (Path(__file__).parents[3] / "support" / "vllm_generation.py").read_text(encoding="utf-8")
START_S = patience_s(240)

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="needs vLLM in an environment of its own: run scripts/conformance-vllm"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
CPUS = sorted(os.sched_getaffinity(0))


class Model:
    """A tiny model as its author's files and as an artifact, the latter behind a store."""

    def __init__(self, family: str, folder: Path) -> None:
        self.plain = save_tiny(family, folder / "plain", dtype=torch.bfloat16, hidden_size=128)
        self.packed = folder / "store" / "packed"
        self.pin = pack(FileStore(self.plain), FileStore(self.packed)).pin
        self.digits = self.pin.rpartition("@b3:")[2]
        self.stored_bytes = sum(path.stat().st_size for path in self.packed.rglob("*.bin"))

    @contextmanager
    def served(self) -> Iterator[tuple[StoreServer, str]]:
        """A store, and the artifact's pinned address in it."""
        with StoreServer(self.packed.parent) as server:
            yield server, f"{server.url}/packed@b3:{self.digits}"

    def weights_sent(self, server: StoreServer) -> int:
        return sum(entry.sent_bytes for entry in server.log() if entry.key.endswith(".bin"))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "HF_", "OMP_"))},
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm-cache")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CPUS[:2])),  # a worker a core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def generate(environment: dict[str, str], **options: object) -> tuple[list[list[int]], str]:
    """The tokens, and vLLM's whole output. With one worker by default."""
    own = dict(environment)
    if options.get("tensor_parallel_size", 1) == 1:
        own["VLLM_CPU_OMP_THREADS_BIND"] = str(CPUS[0])
    done = _run(own, options)
    assert done.returncode == 0, done.stdout[-6000:]
    tokens = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    return json.loads(tokens.removeprefix("TOKENS ")), done.stdout


def _run(environment: dict[str, str], options: dict[str, object]) -> subprocess.CompletedProcess[str]:
    program = Path(environment["VLLM_CACHE_ROOT"]) / "generate.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [PYTHON, str(program), json.dumps(options)]
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=START_S,
    )


@pytest.fixture(scope="module")
def tokens_of_two(llama: Model, environment: dict[str, str]) -> list[list[int]]:
    """vLLM's own, with two workers, whose sums are rounded otherwise than one's."""
    return generate(environment, model=str(llama.plain), tensor_parallel_size=2)[0]


def teneral_lines(output: str) -> list[str]:
    found = re.findall(r"(?:INFO|WARNING) .*?\] (teneral: .*)", output)
    print("\n".join(found))
    return found


def test_an_artifact_in_a_store_gives_the_tokens_that_vllms_own_loading_gives(model, environment):
    expected, _ = generate(environment, model=str(model.plain))
    with model.served() as (server, address):
        tokens, output = generate(environment, model=address, load_format="teneral")
        assert 0 <= model.stored_bytes - model.weights_sent(server) < 1000
    assert tokens == expected
    assert len({*map(tuple, tokens)}) == len(PROMPTS)  # or equal would say little
    (line,) = teneral_lines(output)
    assert f"verified by b3:{model.digits[:12]}" in line


@pytest.mark.skipif(len(CPUS) < 2, reason="vLLM gives each of its workers a core")
def test_two_tensor_parallel_workers_read_the_store_once_between_them(llama, environment, tokens_of_two):
    with llama.served() as (server, address):
        tokens, output = generate(environment, model=address, load_format="teneral", tensor_parallel_size=2)
        assert 0 <= llama.stored_bytes - llama.weights_sent(server) < 1000
    assert tokens == tokens_of_two
    assert len([line for line in teneral_lines(output) if "this worker's share of 2" in line]) == 2


@pytest.mark.skipif(len(CPUS) < 2, reason="vLLM gives each of its workers a core")
def test_workers_that_do_not_share_read_the_whole_each(llama, environment, tokens_of_two):
    extra = {"artifact": llama.pin, "share": False, "memory_bytes": 1 << 20}
    tokens, output = generate(
        environment,
        model=str(llama.plain),
        load_format="teneral",
        tensor_parallel_size=2,
        model_loader_extra_config=extra,
    )
    assert tokens == tokens_of_two
    assert [line for line in teneral_lines(output) if "share of" in line] == []
    assert len(teneral_lines(output)) == 2


def test_plain_safetensors_are_loaded_and_logged_as_unverified(llama, environment):
    tokens, output = generate(environment, model=str(llama.plain), load_format="teneral")
    assert len(tokens[0]) == NUM_TOKENS
    (line,) = teneral_lines(output)
    assert "NOT verified" in line


def test_a_damaged_artifact_is_refused_with_our_own_words(llama, environment, tmp_path):
    copied = tmp_path / "copy"
    pack(FileStore(llama.plain), FileStore(copied))
    blob = next(copied.rglob("refine-*.bin"))
    data = bytearray(blob.read_bytes())
    data[-20] ^= 1
    blob.write_bytes(data)
    own = {**environment, "VLLM_CPU_OMP_THREADS_BIND": str(CPUS[0])}
    done = _run(own, {"model": str(copied), "load_format": "teneral"})
    assert done.returncode != 0
    assert re.search(r"IntegrityError: part \d+ \(head refine", done.stdout)
    assert "`teneral verify` names every bad part" in done.stdout


def test_vllm_serve_takes_an_artifacts_address_for_a_model(llama, environment):
    with llama.served() as (_, address):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with serving(environment, address, port):
            body = {"model": address, "prompt": list(PROMPTS[0]), "max_tokens": 4, "temperature": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=patience_s(60)) as answer:
                completion = json.load(answer)
    assert completion["model"] == address
    assert completion["usage"]["completion_tokens"] == 4


@contextmanager
def serving(environment: dict[str, str], address: str, port: int) -> Iterator[None]:
    command = [
        str(Path(PYTHON).parent / "vllm"),
        "serve",
        address,
        "--load-format",
        "teneral",
        "--dtype",
        "bfloat16",
    ]
    command += ["--enforce-eager", "--max-model-len", "128", "--host", "127.0.0.1", "--port", str(port)]
    own = {**environment, "VLLM_CPU_OMP_THREADS_BIND": str(CPUS[0])}
    # The command asks for the version of a distribution called vllm, which the build for CPUs is not called.
    about = Path(environment["VLLM_CACHE_ROOT"]) / "vllm-0+cpu.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n", encoding="utf-8")
    own["PYTHONPATH"] = environment["VLLM_CACHE_ROOT"]
    log = Path(environment["VLLM_CACHE_ROOT"]) / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT)
    try:
        until_s = time.monotonic() + START_S
        while not _answers(port):
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            assert time.monotonic() < until_s, "vllm serve did not answer"
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patience_s(60))


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
