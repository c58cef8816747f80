"""`teneral serve` in a container with less memory than its model needs: it says so, with the numbers, before it
reads any weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.cgroups import MemoryCgroup, memory_cgroup
from tests.support.load import patience_s
from tests.support.standby_processes import until
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny, tiny_config

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import InsufficientMemoryError
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.memory.limits import MIB, taken_bytes
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(90)
LIMIT_BYTES = 512 * MIB  # Python and torch fit
HEADER_READ_BYTES = 128 << 10  # of a safetensors file, whose header's size is unknown before
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6}  # 721 MiB in bf16


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder "bucket" with a model whose weights are zeros, "plain" and "packed"."""
    bucket = tmp_path_factory.mktemp("memory") / "bucket"
    save_tiny("llama", bucket / "plain")
    (bucket / "plain" / "config.json").write_text(
        tiny_config("llama", **LARGE, dtype="bfloat16").to_json_string()
    )
    _write_zeros(bucket / "plain" / "model.safetensors")
    pack(FileStore(bucket / "plain"), FileStore(bucket / "packed"))
    return bucket


def _write_zeros(path: Path) -> None:
    """Where nothing was written, a file takes no room and is read as zeros."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", **LARGE))
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)


WEIGHT_BYTES = 721 * MIB
# For the weights' way here and half of the server: the check passed, and then it was killed.
SERVING_BYTES = 150 * MIB


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with memory_cgroup() as cgroup:
        cgroup.set_limit(LIMIT_BYTES)
        yield cgroup
        until(lambda: not (cgroup.folder / "cgroup.procs").read_text(), "the server's helpers to end")


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_a_model_larger_than_the_containers_memory_is_refused_before_its_weights_are_read(
    bucket: Path, cgroup: MemoryCgroup, kind: str
) -> None:
    with StoreServer(bucket.parent) as store:
        command = [sys.executable, "-m", "teneral", "serve", f"{store.url}/bucket/{kind}", "--port", "0"]
        ended = subprocess.run(
            cgroup.command(command), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        log = store.log()
    assert ended.returncode == 16, ended.stderr
    numbers = re.search(
        r"loading the model from \S+ needs ([\d,]+) MiB of memory \(weights ([\d,]+), .*\), "
        r"but ([\d,]+) MiB are available \((.*)\)\n  Give the container more memory",
        ended.stderr,
    )
    assert numbers, ended.stderr
    needed, weights, available = (int(number.replace(",", "")) for number in numbers.groups()[:3])
    assert available < LIMIT_BYTES / MIB < weights <= needed
    assert numbers[4] == cgroup.name
    assert "Traceback" not in ended.stderr
    assert not [entry for entry in log if "/blobs/" in entry.key]
    of_plain = [entry.end for entry in log if entry.key.endswith("model.safetensors") and entry.status == 206]
    assert max(of_plain, default=0) <= HEADER_READ_BYTES


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_memory_for_the_weights_but_not_for_serving_them_is_refused_and_not_killed(
    bucket: Path, cgroup: MemoryCgroup, kind: str
) -> None:
    cgroup.set_limit(WEIGHT_BYTES + SERVING_BYTES)
    with StoreServer(bucket.parent) as store:
        command = [sys.executable, "-m", "teneral", "serve", f"{store.url}/bucket/{kind}", "--port", "0"]
        ended = subprocess.run(
            cgroup.command(command), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        log = store.log()
    assert ended.returncode == 16, ended.stderr
    assert "the server's processes another" in ended.stderr
    assert not [entry for entry in log if "/blobs/" in entry.key]


@pytest.mark.parametrize("flag", ["v", "d"])
def test_a_limit_of_the_process_is_a_limit_of_its_memory(bucket: Path, flag: str) -> None:
    """Its numbers count addresses, of which the weights take as many as they have bytes."""
    serve = f"{sys.executable} -m teneral serve {bucket / 'packed'} --host 127.0.0.1 --port 0"
    limit_kib = (WEIGHT_BYTES - MIB) >> 10
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -{flag} {limit_kib}; exec {serve}"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 16, ended.stderr
    assert re.search(
        rf"needs [\d,]+ MiB of memory .* are available \(RLIMIT_\w+, ulimit -{flag}\)", ended.stderr
    )


def test_a_load_counts_the_need_of_serving_less_the_memory_already_taken(bucket: Path) -> None:
    source = FileStore(bucket / "packed")
    manifest = open_artifact(source)
    options = LoadOptions(available_bytes=manifest.weight_bytes + 200 * MIB, serving_bytes=MIB)
    WeightLoad(source, manifest, options=options).close()  # this process has more than that already
    taken = taken_bytes(os.getpid())
    assert taken > MIB
    with pytest.raises(InsufficientMemoryError, match=r"the server's processes another \d+") as caught:
        WeightLoad(source, manifest, options=options._replace(serving_bytes=taken + 300 * MIB))
    assert "Give the container more memory" in caught.value.hint
    source.close()


def test_what_a_process_has_taken_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "status").write_text("Name:\tx\nRssAnon:\t  2048 kB\nRssShmem:\t 99999 kB\n")
    assert taken_bytes(7, 8, root=str(tmp_path)) == 2 * MIB
