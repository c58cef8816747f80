"""`teneral pool run` of fine-tunes, stored as differences and as adapters: real packs, real servers."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapters import save_adapter
from tests.support.inspection import make_supervisor
from tests.support.pool_runs import PoolRun
from tests.support.standby_processes import until
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli
from teneral.handlers.pool.admission import STANDBY_KEY
from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.repository import ReleaseRepository
from teneral.handlers.pool.run import PoolRunner, RunOptions, run_pool
from teneral.handlers.pool.values import Pool
from teneral.handlers.standby.handover import ask_status
from teneral.loader.errors import UnavailableError, UsageError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]


def packed(model: Path, artifact: Path, *flags: str) -> None:
    assert cli.run(["pack", str(model), str(artifact), "--quiet", *flags]) == 0


def test_fine_tunes_of_one_base_answer_as_whole_ones_do(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base-plain")
    packed(base, tmp_path / "base")
    for version in ("1", "2"):
        model = save_tiny("llama", tmp_path / f"plain-{version}")
        chance = torch.Generator().manual_seed(int(version))
        weights = {
            name: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=chance))
            for name, tensor in load_file(model / "model.safetensors").items()
        }
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        packed(model, tmp_path / "tuned" / version, "--base", str(tmp_path / "base"))
        packed(model, tmp_path / "whole" / version)
    file = """
version = 1
[defaults.serve]
kv_bytes = "8MiB"
threads = 1
[models.tuned]
source = "tuned/{version}"
base = "base"
versions = "all"
[models.whole]
source = "whole/{version}"
versions = "all"
[models.base]
source = "base"
[node]
memory = "8GiB"
"""
    with PoolRun(tmp_path, file) as run:
        texts = {}
        for version in ("1", "2"):
            texts[version] = run.complete(f"tuned@{version}", max_tokens=16).text
            assert texts[version] == run.complete(f"whole@{version}", max_tokens=16).text
        texts["base"] = run.complete("base", max_tokens=16).text
        assert len(set(texts.values())) == 3


def test_standby_processes_hold_a_base_that_fine_tunes_and_their_models_use(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base-plain")
    packed(base, tmp_path / "base")
    model = save_tiny("llama", tmp_path / "tuned-plain", seed=5)
    packed(model, tmp_path / "tuned", "--base", str(tmp_path / "base"))
    file = """
version = 1
[defaults.serve]
kv_bytes = "8MiB"
threads = 1
[models.tuned]
source = "tuned"
base = "base"
[models.base]
source = "base"
[node]
memory = "8GiB"
standby = 2
standby_base = "base"
"""
    with PoolRun(tmp_path, file, "--state-dir", str(tmp_path / "state")) as run:
        socket = str(tmp_path / "state" / "standby.sock")
        until(lambda: bool(base_of(socket)), "the base")
        held = base_of(socket)
        for name in ("base", "tuned"):
            answer = run.complete(name, max_tokens=16)
            assert (answer.status, answer.headers["x-teneral-start"]) == (200, "standby")
            assert shared_bytes(run, name) == held["bytes"]
        packed(model, tmp_path / "other")
        shutil.rmtree(tmp_path / "base")
        (tmp_path / "other").rename(tmp_path / "base")
        run.process.send_signal(signal.SIGHUP)
        until(lambda: base_of(socket).get("digest", held["digest"]) != held["digest"], "another base")


def base_of(socket: str) -> dict[str, Any]:
    """The base that the pool's standby processes have, once they have it."""
    with suppress(UnavailableError):
        status: dict[str, Any] = ask_status(socket)["base"]
        return status if status["bytes"] and not status["loading"] else {}
    return {}


def shared_bytes(run: PoolRun, name: str) -> float:
    (instance,) = run.instances(name)
    with urllib.request.urlopen(f"{instance['url']}/metrics") as answer:
        text = answer.read().decode()
    (line,) = re.findall(r"^teneral_shared_base_bytes (\S+)$", text, re.MULTILINE)
    return float(line)


def test_a_base_of_standby_processes_must_be_packed_and_its_memory_is_reserved(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "plain")
    node = '[node]\nstandby = 1\nstandby_base = "plain"\n'
    (tmp_path / "pool.toml").write_text(f'version = 1\n[models.m]\nsource = "plain"\n{node}')
    with pytest.raises(UsageError, match="plain is not packed"):
        run_pool(RunOptions(file=str(tmp_path / "pool.toml"), port=0))
    packed(tmp_path / "plain", tmp_path / "packed")
    pool = parse_pool(f"""
version = 1
[models.m]
source = "{tmp_path}/plain"
[node]
memory = "1GiB"
standby = 2
standby_memory = "1MiB"
standby_base = "{tmp_path}/packed"
""")
    base = ReleaseRepository(tmp_path).standby_base(pool.node)
    assert base is not None
    kept = asyncio.run(kept_bytes(pool, tmp_path))
    assert kept == (2 << 20) + base.weight_bytes > 2 << 20


async def kept_bytes(pool: Pool, folder: Path) -> int:
    """The memory that the pool reserves for standby processes."""
    supervisor, _ = await make_supervisor(PoolRunner(pool, RunOptions(), folder, {}))
    return supervisor.budget.charge_of(STANDBY_KEY)


def test_adapters_are_named_after_models_versions_and_aliases(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "plain")
    packed(model, tmp_path / "base" / "1")
    save_adapter(tmp_path / "adapters" / "legal", tiny_model("llama"), seed=1)
    file = """
version = 1
[models.base]
source = "base/{version}"
[models.base.serve]
adapters = "adapters/{name}"
kv_bytes = "8MiB"
threads = 1
[models.other]
source = "base/1"
[aliases]
short = "base"
[node]
memory = "8GiB"
"""
    with PoolRun(tmp_path, file) as run:
        plain = run.complete("base", max_tokens=16)
        expected = run.complete("base", max_tokens=16, lora="legal")
        assert expected.status == 200, expected.body
        assert expected.text != plain.text
        for name in ("base:legal", "BASE:legal", "base@1:legal", "short:legal"):
            answer = run.complete(name, max_tokens=16)
            assert (answer.status, answer.text) == (200, expected.text), (name, answer.body)
            assert answer.json["model"] == "base:legal"
        for name in ("base:none", "base@2:legal", "nothing:legal", "base:", ":legal", "other:legal"):
            missing = run.complete(name)
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found"), name
        assert "none" in run.complete("base:none").json["error"]["message"]
