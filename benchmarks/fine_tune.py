"""A warm server's switch to a fine-tune, on weights made for it: normal ones of deviation 0.1, with Adam-like updates.

    python -m benchmarks.fine_tune [--rounds 5] [--rate 200] [--learning-rate 1e-4] [--save]

The base has the shape of --like. Its fine-tune adds to every matrix what 40 steps of Adam with random gradients add at
the learning rate, in fp32, rounded to bf16 at the end. Sizes of differences depend on both (docs/fine-tunes.md), and
trained models have smaller weights: times by wire are what carries over. A store gives --rate MB/s; rows take turns:

    base, warm        the first token of such a prompt on the warm server of the base, before any switch
    switch, drafted   a warm server of the base; from the request to switch, sent after the manifest was read to a
                      client that allows drafts: its first token
    switch, exact     the same, and a client that does not
    switch            until the request to switch returns: all is exact
    back              the switch back to the base
    based, cold       `teneral serve TUNED --base BASE` in a new process: its first token
    whole, cold       `teneral serve` of the whole fine-tune in a new process
    standby           `teneral serve TUNED --base BASE` from a process of a standby pool
    base held, tuned  `teneral serve TUNED` from a process of a standby pool that has the base in memory
    base held, draft  the same, to a client that allows drafts
    base held, base   `teneral serve BASE` from a process of that pool

Below the table: the warm server's own memory, with the base, with the fine-tune as well, and with the base again.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks import cold_starts
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.server import Server
from benchmarks.store import StoreProcess, read_once
from benchmarks.tasks import random_prompt

from teneral.loader.format.safetensors import SafetensorsWriter, TensorSpec
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.synth import SHAPES, synthesize, tensor_specs

PROMPT_TOKENS = 32
DEVIATION = 0.1
STEPS = 40
POOL_ELEMENTS = 1 << 20  # of simulated updates, from which each weight's is drawn
BLOCK_ELEMENTS = 1 << 22
POLL_S = 0.002
PATH = "/v2/repository/models/model/load"

Floats = npt.NDArray[np.float32]


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--layers", type=int, help="fewer than the shape has, to try it")
    options = parser.parse_args()
    name = f"{options.like}-{options.layers or 'all'}-{options.learning_rate:g}"
    root = options.work / "fine-tune" / name
    sizes = prepare(options.like, root, options.learning_rate, options.layers)
    report = begin(
        "fine_tune",
        model=options.like,
        rounds=options.rounds,
        rate_mb_s=options.rate,
        learning_rate=options.learning_rate,
        stored_bytes=sizes,
    )
    with StoreProcess(root, rate_mb_s=options.rate) as store:
        report["results"], report["resident_mb"] = measure(store, options.rounds, options.work)
    finish(report, render(report), save=options.save)


def prepare(like: str, root: Path, learning_rate: float, num_layers: int | None) -> dict[str, int]:
    """Write and pack the models once; the stored bytes of each artifact's weights."""
    models = root / "models"
    if not (models / "done").exists():
        shutil.rmtree(root, ignore_errors=True)
        synthesize(like, root / "small", num_layers=1)  # for its tokenizer and config
        config = SHAPES[like] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
        updates = adam_updates(learning_rate)
        for kind in ("base", "tuned"):
            write_model(config, root / "small", root / kind, updates if kind == "tuned" else None)
        for kind, plain in (("base", "base"), ("whole", "tuned")):
            pack(FileStore(root / plain), FileStore(models / kind))
        base = Base(FileStore(models / "base"))
        pack(FileStore(root / "tuned"), FileStore(models / "tuned"), base=base)
        for plain in ("base", "tuned", "small"):
            shutil.rmtree(root / plain)
        (models / "done").touch()
    read_once(models)
    return {
        kind: sum(path.stat().st_size for path in (models / kind).rglob("*.bin"))
        for kind in ("base", "tuned", "whole")
    }


def adam_updates(learning_rate: float) -> Floats:
    """The sum of the updates of Adam with the usual constants for a weight in 40 steps of standard normal gradients."""
    chance = np.random.default_rng(0)
    mean, square, total = (np.zeros(POOL_ELEMENTS, np.float32) for _ in range(3))
    for step in range(1, STEPS + 1):
        gradient = chance.standard_normal(POOL_ELEMENTS, np.float32)
        mean += np.float32(0.1) * (gradient - mean)
        square += np.float32(0.001) * (gradient**2 - square)
        corrected = square / np.float32(1 - 0.999**step)
        total -= learning_rate / (1 - 0.9**step) * mean / (np.sqrt(corrected) + np.float32(1e-8))
    return total.astype(np.float32)


def write_model(config: dict[str, Any], like: Path, folder: Path, updates: Floats | None) -> None:
    """A model directory with the base's weights, or with these updates of its matrices."""
    folder.mkdir(parents=True)
    for path in like.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | config))
    specs = tensor_specs(config)
    with (folder / "model.safetensors").open("wb") as file:
        writer = SafetensorsWriter(file, specs, {"format": "pt"})
        for number, spec in enumerate(specs):
            for block in content(spec, number, updates):
                writer.write(block)
        writer.finish()


def content(spec: TensorSpec, number: int, updates: Floats | None) -> Iterator[memoryview]:
    """A tensor's bytes in bf16. Vectors are near 1, biases near 0, in both models."""
    weights, changes = np.random.default_rng([1, number]), np.random.default_rng([2, number])
    left = math.prod(spec.shape)
    while left:
        count = min(left, BLOCK_ELEMENTS)
        left -= count
        values = weights.standard_normal(count, np.float32)
        values *= np.float32(DEVIATION if len(spec.shape) > 1 else 0.05)
        if len(spec.shape) == 1 and spec.name.endswith("weight"):
            values += 1
        elif len(spec.shape) > 1 and updates is not None:
            begun = rounded(values).astype(np.uint32) << 16  # from the bf16 that the base is stored as
            values = begun.view(np.float32) + updates[changes.integers(0, len(updates), count)]
        yield rounded(values).view(np.uint8).data


def rounded(values: Floats) -> npt.NDArray[np.uint16]:
    """The values' bit patterns in bf16, rounded to the nearest even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def measure(store: StoreProcess, rounds: int, work: Path) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds by row, and the megabytes of the memory line, of the last round."""
    found: dict[str, list[float]] = {}
    resident_mb = [0.0, 0.0, 0.0]
    variables = store.environment()

    def add(row: str, value: float) -> None:
        found.setdefault(row, []).append(value)
        note(f"{row:16} {value:.3f}")

    with Server("s3://models/base", "--model-control", variables=variables) as server:
        server.wait_ready()
        chance = random.Random(0)
        server.complete(random_prompt(chance, PROMPT_TOKENS), 8)
        for _ in range(rounds):
            resident_mb[0] = own_memory_mb(server.pid)
            add("base, warm", server.complete(random_prompt(chance, PROMPT_TOKENS), 1).token_times_s[0])
            for first_token in ("draft", "exact"):
                first_s, all_s, num_drafted = switch(
                    server, random_prompt(chance, PROMPT_TOKENS), first_token
                )
                add(f"switch, {'drafted' if first_token == 'draft' else first_token}", first_s)
                if num_drafted != (first_token == "draft"):
                    raise RunError(f"{num_drafted} drafted tokens, where {first_token} was asked for")
                add("switch", all_s)
                resident_mb[1] = own_memory_mb(server.pid)
                begun_s = time.monotonic()
                server.post(PATH, {"parameters": {"model": "s3://models/base"}})
                add("back", time.monotonic() - begun_s)
                time.sleep(1.0)  # the fine-tune's memory is given back
                resident_mb[2] = own_memory_mb(server.pid)
        # The warm server idles meanwhile, in memory that the cold ones do not need.
        for _ in range(rounds):
            for row, arguments in (
                ("based, cold", ["s3://models/tuned", "--base", "s3://models/base"]),
                ("whole, cold", ["s3://models/whole"]),
            ):
                add(row, cold_starts.serve(*arguments, variables=variables).first_token_s)
    based, base = ["s3://models/tuned", "--base", "s3://models/base"], "s3://models/base"
    with (
        cold_starts.StandbyPool(work) as plain,
        cold_starts.StandbyPool(work, base=base, variables=variables) as holding,
    ):
        for _ in range(rounds):
            for row, arguments, pool in (
                ("standby", based, plain),
                ("base held, tuned", ["s3://models/tuned"], holding),
                ("base held, draft", ["s3://models/tuned", "--first-token", "draft"], holding),
                ("base held, base", [base], holding),
            ):
                add(row, cold_starts.serve(*arguments, variables=variables, pool=pool).first_token_s)
    return found, resident_mb


def own_memory_mb(process_id: int) -> float:
    """Anonymous memory, in which an artifact's weights are."""
    status = Path(f"/proc/{process_id}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024 / 1e6


def switch(server: Server, prompt: list[int], first_token: str) -> tuple[float, float, int]:
    """Seconds from the request to switch, to the first token and to its answer; and the drafted tokens."""
    begun_s, ended_s = time.monotonic(), 0.0
    failures: list[RunError] = []

    def change() -> None:
        nonlocal ended_s
        try:
            server.post(PATH, {"parameters": {"model": "s3://models/tuned"}})
        except RunError as error:
            failures.append(error)
        ended_s = time.monotonic()

    changing = threading.Thread(target=change)
    changing.start()
    while changing.is_alive():
        (entry,) = server.post("/v2/repository/index", {})
        if entry["reason"].startswith("switching"):
            break
        time.sleep(POLL_S)
    answer = server.complete(prompt, 1, since_s=begun_s, first_token=first_token)
    changing.join()
    if failures:
        raise failures[0]
    return answer.token_times_s[0], ended_s - begun_s, answer.num_drafted


def render(report: dict[str, Any]) -> str:
    results, sizes = report["results"], report["stored_bytes"]
    wires_s = {kind: size / report["rate_mb_s"] / 1e6 for kind, size in sizes.items()}
    wires_s["based"] = wires_s["tuned"] + wires_s["base"]
    of_row = {
        "switch, exact": wires_s["tuned"],
        "switch": wires_s["tuned"],
        "based, cold": wires_s["based"],
        "whole, cold": wires_s["whole"],
        "standby": wires_s["based"],
        "base held, tuned": wires_s["tuned"],
    }
    rows = []
    for row, values in results.items():
        median = statistics.median(values)
        wire = f"{median / of_row[row]:.2f}x {of_row[row]:.3f} s" if row in of_row else ""
        rows.append([row, f"{median:.3f}", f"{min(values):.3f}–{max(values):.3f}", wire])
    words = [
        report["model"],
        f"learning rate {report['learning_rate']:g}",
        f"differences of {sizes['tuned'] / 1e6:.0f} MB",
        f"base {sizes['base'] / 1e6:.0f}, whole {sizes['whole'] / 1e6:.0f}",
        f"{report['rounds']} rounds",
    ]
    memory = "memory: {:.0f} MB, {:.0f} MB, {:.0f} MB".format(*report["resident_mb"])
    columns = ["row", "median (s)", "from–to", "by wire time"]
    return "\n".join([title(report, *words), table(columns, rows), "", memory])


if __name__ == "__main__":
    main()
