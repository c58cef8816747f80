"""ONNX models: exec → first answer behind a link and from a local folder, warm calls, and the peak of memory.

    python -m benchmarks.onnx [--rate-mb-s 200] [--rounds 3] [--only cold|local|warm|http|memory] [--save]

Models are encoders with random weights: one of BERT base's shape (435 MB of fp32) in an S3 store, and one of
MiniLM's (90 MB) in a local folder. Ways take turns.

cold, local: `teneral serve` on the packed artifact, over HTTP, and a bare process that imports onnxruntime, makes an
InferenceSession and runs it once, after boto3 has downloaded the files where these are in the store. "wire" is the
time that a way's own bytes take at the link's rate. In a local folder there is also a process that answers over HTTP,
too, with aiohttp and an InferenceSession in a few lines.

warm: `context.model.run` and `InferenceSession.run` of the original file, with the same arrays in the same thread of
one process. Calls alternate; rows with more words are the same after 50 ms of rest, and in turns of 30 calls each, of
which the first 5 do not count. "a second session" is another InferenceSession in place of Teneral: what it differs by
is the measurement's own error. "queued" is `OnnxRunner.submit`, as of `arun`, which another thread runs. Figures are
lower deciles: on two cores a call takes twice as long where ONNX Runtime's second thread has no core. "processor time
of one thread" is of sessions with one thread, in turns, and does not depend on what else runs.

http: the same inputs to a server over one connection, as the Open Inference Protocol's bytes and as JSON to /invoke,
next to `InferenceSession.run` in the client's process: what HTTP and the event loop add, in milliseconds.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.processes import MemoryWatch, RunError, environment
from benchmarks.report import begin, finish, machine, new_parser, note, table, title
from benchmarks.server import HOST, Program, Server
from benchmarks.store import StoreProcess

TOKENS = 32
WARM_CALLS = 30
SKIPPED_CALLS = 5  # of each turn
REST_S = 0.05
SHAPES = {"bert-base": (12, 768, 12, 30_522), "minilm": (6, 384, 12, 30_522)}

BARE = f"""
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
ids = numpy.arange(1, {TOKENS} + 1, dtype="i8")[None]
session.run(None, {{"input_ids": ids, "attention_mask": numpy.ones_like(ids)}})
"""

DOWNLOAD = """
import sys, tempfile, boto3
folder = tempfile.mkdtemp()
client = boto3.client("s3")
for name in ("model.onnx", "model.data"):
    client.download_file("models", sys.argv[1] + "/model/" + name, folder + "/" + name)
sys.argv[1] = folder + "/model.onnx"
"""


AIOHTTP = """
import sys, aiohttp.web, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
async def invoke(request):
    inputs = (await request.json())["inputs"]
    (made,) = session.run(None, {name: numpy.array(data, "i8") for name, data in inputs.items()})
    return aiohttp.web.json_response({"outputs": {"embedding": made.tolist()}})
app = aiohttp.web.Application()
app.router.add_post("/invoke", invoke)
aiohttp.web.run_app(app, host=sys.argv[2], port=int(sys.argv[3]), print=None)
"""


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    options = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of the sessions in this process
    root = options.work / "onnx"
    for name in SHAPES:
        prepare(root / "models" / name, name)
    report = begin("onnx", rate_mb_s=options.rate_mb_s, rounds=options.rounds)
    lines: list[list[str]] = []
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "cold": lambda: cold(root, options.rate_mb_s, options.rounds),
        "local": lambda: local(root / "models" / "minilm", options.rounds),
        "warm": lambda: warm(root / "models" / "minilm", options.rounds),
        "http": lambda: over_http(root / "models" / "minilm", options.rounds),
        "memory": lambda: memory(root / "models" / "bert-base"),
    }
    for name, measure in measures.items():
        if options.only is None or options.only == name:
            report[name] = measure()
            lines += [[f"{name}: {key}", f"{value:.3f}"] for key, value in report[name].items()]
    finish(report, title(report, "ONNX models") + table(["", ""], lines), save=options.save)


def prepare(folder: Path, name: str) -> None:
    """The model's file and its artifact, made once."""
    if (folder / "artifact" / "manifest.json").exists():
        return
    from tests.support.onnx_models import Made, Net, save

    from teneral.loader.sources.file.store import FileStore
    from teneral.runtime.onnx.pack import pack_onnx

    layers, width, heads, vocab = SHAPES[name]
    net = Net()
    ids = net.input("input_ids", ["batch", "tokens"], 7)
    mask = net.input("attention_mask", ["batch", "tokens"], 7)
    x = net.norm(net.op("Gather", net.weight(vocab, width), ids), width)
    for _ in range(layers):
        x = net.block(x, width, heads)
    weights = net.op("Unsqueeze", net.op("Cast", mask, to=1), net.constant(np.array([2])))
    total = net.op("ReduceSum", net.op("Mul", x, weights), net.constant(np.array([1])), keepdims=0)
    count = net.op("ReduceSum", weights, net.constant(np.array([1])), keepdims=0)
    net.op("Div", total, count, name="embedding")
    net.output("embedding", ["batch", width])
    path = save(Made(net.model(), {}), folder / "model" / "model.onnx", external=True)
    note(f"packing {name}")
    pack_onnx(str(path), FileStore(folder / "artifact"))


def cold(root: Path, rate_mb_s: float, rounds: int) -> dict[str, float]:
    """Seconds, medians: behind a link of this rate."""
    artifact, plain = root / "models" / "bert-base" / "artifact", root / "models" / "bert-base" / "model"
    packed_bytes, plain_bytes = size_of(artifact), size_of(plain)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        for path in (artifact, plain):
            touch(path)
        with StoreProcess(root, rate_mb_s=rate_mb_s, latency_ms=15.0) as store:
            variables = store.environment()
            ours.append(served("s3://models/bert-base/artifact", variables))
        with (
            tempfile.TemporaryDirectory() as folder,  # of the download, which its process does not remove
            StoreProcess(root, rate_mb_s=rate_mb_s, latency_ms=15.0) as store,
        ):
            variables = {**store.environment(), "TMPDIR": folder}
            theirs.append(run_bare(DOWNLOAD + BARE, "bert-base", variables))
        note(f"round {number + 1}: {ours[-1]:.2f} s, boto3 and InferenceSession {theirs[-1]:.2f} s")
    mine, other = statistics.median(ours), statistics.median(theirs)
    wire_s = packed_bytes / rate_mb_s / 1e6
    return {
        "packed MB": packed_bytes / 1e6,
        "plain MB": plain_bytes / 1e6,
        "wire s": wire_s,
        "teneral s": mine,
        "teneral / wire": mine / wire_s,
        "boto3 and InferenceSession s": other,
        "sooner by": other / mine,
    }


def local(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds, medians: from a local folder in the page cache."""
    model = str(folder / "model" / "model.onnx")
    times: dict[str, list[float]] = {"teneral": [], "bare onnxruntime": [], "aiohttp and onnxruntime": []}
    for number in range(rounds):
        for path in (folder / "artifact", folder / "model"):
            touch(path)
        times["teneral"].append(served(str(folder / "artifact"), {}))
        times["bare onnxruntime"].append(run_bare(BARE, model, {}))
        with Program(lambda port: [sys.executable, "-c", AIOHTTP, model, HOST, str(port)]) as program:
            times["aiohttp and onnxruntime"].append(ask(program))
        note(f"round {number + 1}: " + ", ".join(f"{name} {kept[-1]:.3f} s" for name, kept in times.items()))
    medians = {name: statistics.median(kept) for name, kept in times.items()}
    mine, bare, web = medians.values()
    return {f"{name} s": value for name, value in medians.items()} | {
        "teneral / bare": mine / bare,
        "teneral / aiohttp and onnxruntime": mine / web,
    }


def warm(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of a call, lower deciles over all turns, and ratios."""
    inputs = _inputs()
    report: dict[str, float] = {}
    with _served_here(folder, threads=machine()["cores"]) as (run, submit):
        plain, second = (_session(folder) for _ in range(2))
        ways: dict[str, Callable[[], object]] = {
            "teneral": lambda: run(inputs),
            "a second session": lambda: second.run(None, inputs),
            "queued": lambda: submit(inputs).result(60),
        }
        for name, way in ways.items():
            both = way, lambda: plain.run(None, inputs)
            mine, other = _warm_calls(*both, rounds=rounds * WARM_CALLS)
            report |= {f"{name} ms": mine, f"InferenceSession ms, against {name}": other}
            report[f"{name} / InferenceSession"] = mine / other
            mine, other = _warm_calls(*both, rounds=rounds * WARM_CALLS, rest_s=REST_S)
            report[f"{name} / InferenceSession, after a rest"] = mine / other
            mine, other = _warm_calls(*both, rounds=4 * rounds, calls=WARM_CALLS, skipped=SKIPPED_CALLS)
            report[f"{name} / InferenceSession, turns of {WARM_CALLS}"] = mine / other
    with _served_here(folder, threads=1) as (run, _):
        plain = _session(folder, threads=1)
        mine, other = _warm_calls(
            lambda: run(inputs),
            lambda: plain.run(None, inputs),
            rounds=8 * rounds,
            calls=SKIPPED_CALLS * 3,
            skipped=SKIPPED_CALLS,
            clock=time.thread_time,
        )
    return report | {
        "teneral ms, processor time of one thread": mine,
        "InferenceSession ms, processor time of one thread": other,
        "teneral / InferenceSession, processor time of one thread": mine / other,
    }


@contextmanager
def _served_here(folder: Path, *, threads: int) -> Iterator[tuple[Any, Any]]:
    """`context.model.run` and `OnnxRunner.submit` of an instance in this process, whose whole session computes."""
    from teneral.handlers.function.context import Context
    from teneral.runtime.config import ServeConfig
    from teneral.runtime.instance.instance import Instance

    with Instance(ServeConfig(model=str(folder / "artifact"), threads=threads)) as instance:
        runner = instance.onnx.result(60)
        model = Context(instance, request_id="warm", timeout_s=3600).model
        while not runner.statistics().is_whole:
            model.run(_inputs())
        yield model.run, runner.submit


def over_http(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of a call over one connection, lower deciles, in turns."""
    plain, inputs = _session(folder), _inputs()
    head = json.dumps(
        {
            "inputs": [
                {"name": name, "datatype": "INT64", "shape": list(array.shape),
                 "parameters": {"binary_data_size": array.nbytes}}
                for name, array in inputs.items()
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()  # fmt: skip
    body = b"".join([head, *(array.tobytes() for array in inputs.values())])
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    texts = json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()}}).encode()
    with Server(str(folder / "artifact")) as server:
        ask(server)
        while b'"whole session"' not in get(server, "/timeline"):
            time.sleep(0.05)
        connection = server.connect()
        ways: dict[str, Callable[[], object]] = {
            "InferenceSession in the client": lambda: plain.run(None, inputs),
            "bytes": lambda: _post(connection, "/v2/models/model/infer", body, headers),
            "JSON": lambda: _post(connection, "/invoke", texts, {"content-type": "application/json"}),
        }
        turns = {"rounds": 4 * rounds, "calls": WARM_CALLS, "skipped": SKIPPED_CALLS}
        times = _warm_calls(*ways.values(), **turns)
        connection.close()
    return {f"{name} ms": value for name, value in zip(ways, times, strict=True)}


def _session(folder: Path, *, threads: int | None = None) -> Any:
    """A default one of the original file, with one thread a core by default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or machine()["cores"]
    return onnxruntime.InferenceSession(str(folder / "model" / "model.onnx"), options)


def _inputs() -> dict[str, np.ndarray[Any, Any]]:
    ids = np.arange(1, TOKENS + 1, dtype="i8")[None]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]) -> None:
    connection.request("POST", path, body, dict(headers))
    response = connection.getresponse()
    data = response.read()
    if response.status != http.HTTPStatus.OK:
        raise RunError(f"{response.status} {data[:300]!r}")


def _warm_calls(
    *ways: Callable[[], object],
    rounds: int,
    calls: int = 1,
    skipped: int = 0,
    rest_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of a call, the lower decile of each way. A turn has `calls`, of which the first ones are skipped."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, kept in zip(ways, times, strict=True):
            for number in range(calls):
                time.sleep(rest_s)
                begin_s = clock()
                way()
                if number >= skipped:
                    kept.append(clock() - begin_s)
    return [1e3 * statistics.quantiles(kept, n=10)[0] for kept in times]


def memory(folder: Path) -> dict[str, float]:
    """MB: peaks of the server's processes until its first answer, and until the whole session is there."""
    weights_mb = sum(path.stat().st_size for path in (folder / "model").iterdir()) / 1e6
    touch(folder / "artifact")
    with Server(str(folder / "artifact")) as server, MemoryWatch(server.pid) as watch:
        ask(server)
        first_mb = watch.peak_bytes / 1e6
        server.wait_ready()
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and b'"whole session"' not in get(server, "/timeline"):
            time.sleep(0.05)
        time.sleep(0.5)
        whole_mb = watch.peak_bytes / 1e6
        watch.peak_bytes = 0
        time.sleep(0.5)
        after_mb = watch.peak_bytes / 1e6
    return {
        "weights MB": weights_mb,
        "peak until the first answer MB": first_mb,
        "peak with the exchange MB": whole_mb,
        "after it MB": after_mb,
    }


def served(model: str, variables: dict[str, str]) -> float:
    """Seconds from exec to the first answer over HTTP."""
    with Server(model, variables=variables) as server:
        return ask(server)


def ask(server: Program) -> float:
    """Seconds from the server's exec to its answer."""
    ids = list(range(1, TOKENS + 1))
    body = {"inputs": {"input_ids": [ids], "attention_mask": [[1] * TOKENS]}}
    connection = server.connect(poll_s=0.002)
    try:
        connection.request("POST", "/invoke", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != http.HTTPStatus.OK:
            raise RunError(f"{response.status} {data[:300]!r}")
        return time.monotonic() - server.started_s
    finally:
        connection.close()


def get(server: Server, path: str) -> bytes:
    connection = server.connect()
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def run_bare(program: str, argument: str, variables: dict[str, str]) -> float:
    """Seconds from exec to the end of a Python program."""
    begin_s = time.monotonic()
    subprocess.run([sys.executable, "-c", program, argument], env=environment(variables), check=True)
    return time.monotonic() - begin_s


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def touch(folder: Path) -> None:
    """Read it into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(16 << 20):
                    pass


if __name__ == "__main__":
    main()
