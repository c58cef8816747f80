"""Cold start, side by side: from starting a process to its first token, with the model in an S3 store
behind a link of known rate.

    python -m benchmarks.cold_start [--like qwen2.5-0.5b] [--rate-mb-s 200] [--rounds 3] [--save]

Compared are `teneral serve` on the packed artifact, `teneral serve` on the plain safetensors, and
transformers after boto3 has downloaded the files, which is what people write today. All read the same bytes
from the same server in one run, in turns. The server is a process of its own and paces all connections
together. "Wire" is the time that the bytes alone take at that rate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROMPT = "The quick brown fox jumps over the lazy dog, and then " * 3
RESULTS = Path(__file__).parent / "results"
# Credentials that the store does not check; without any, clients would look for an instance's role first.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_REGION": "us-east-1",
}

TRANSFORMERS = """
import sys, boto3
from pathlib import Path
endpoint, bucket, prefix, directory, prompt = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint)
for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
    client.download_file(bucket, item["Key"], str(Path(directory) / item["Key"].rpartition("/")[2]))
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
inputs = tokenizer(prompt, return_tensors="pt")
print("TOKEN", int(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1]), flush=True)
"""


def main() -> None:
    options = _options()
    work = Path(options.work) / options.like
    root = work / "store"
    wire = _prepare(options.like, work, root)
    with StoreServer(root, options.rate_mb_s, options.latency_ms) as store:
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "teneral, packed": lambda: _teneral(store.url, "s3://models/packed"),
            "teneral, plain safetensors": lambda: _teneral(store.url, "s3://models/plain"),
            "transformers after boto3": lambda: _transformers(store.url),
        }
        if options.only:
            runs = {name: run for name, run in runs.items() if re.search(options.only, name)}
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        for turn in range(options.rounds):
            for name, run in runs.items():
                sample = run()
                samples[name].append(sample)
                print(
                    f"round {turn + 1}: {name:28} {sample['first_token_s']:6.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    report = _report(options, wire, samples)
    print(render(report))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        stem = f"cold-start-{options.like}-{options.rate_mb_s:g}MBs-{report['date'][:10]}-{report['machine']['name']}"
        (RESULTS / f"{stem}.json").write_text(json.dumps(report, indent=2) + "\n")


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    lines = [
        f"{report['model']}, store at {report['rate_mb_s']:g} MB/s, {report['latency_ms']:g} ms to the first byte; "
        f"medians of {report['rounds']} rounds; {report['machine']['name']}, {report['date']}",
        "",
        "| | exec → first token, s | beside the wire | beside transformers | peak memory, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    base = report["results"].get("transformers after boto3", {}).get("first_token_s")
    for name, row in report["results"].items():
        wire_s = report["wire_s"]["packed" if "packed" in name else "plain"]
        ratio = f"{base / row['first_token_s']:.1f}x sooner" if base and base != row["first_token_s"] else "–"
        lines.append(
            f"| {name} | {row['first_token_s']:.2f} | {row['first_token_s'] / wire_s:.2f} x {wire_s:.2f} s | {ratio} "
            f"| {row['peak_mb']:,.0f} |"
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", default="qwen2.5-0.5b", help="a shape that `teneral synth` knows")
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="a pattern: run only what matches it")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "teneral-bench"))
    return parser.parse_args()


def _prepare(like: str, work: Path, root: Path) -> dict[str, float]:
    """Write and pack the model once. Returns the bytes that each way has to fetch."""
    plain, packed = root / "models" / "plain", root / "models" / "packed"
    if not plain.exists():
        _run("synth", str(plain), "--like", like)
    if not (packed / "manifest.json").exists():
        _run("pack", str(plain), str(packed), "--force")
    return {
        name: sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        for name, path in (("plain", plain), ("packed", packed))
    }


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "teneral", *arguments], check=True)


class StoreServer:
    """The paced store, in a process of its own."""

    def __init__(self, root: Path, rate_mb_s: float, latency_ms: float) -> None:
        command = [sys.executable, "-m", "tests.support.store_server", "--root", str(root), "--port", "0"]
        command += ["--rate-mb-s", str(rate_mb_s), "--latency-ms", str(latency_ms)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _teneral(endpoint: str, model: str) -> dict[str, Any]:
    """Start a server and ask it at once, as the request that woke the container does."""
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "teneral",
        "serve",
        model,
        "--endpoint-url",
        endpoint,
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--name", "model", "--log-level", "error"]
    started_s = time.monotonic()
    process = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
    try:
        connection = _connect(port, process)
        body = {
            "model": "model",
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: "):
                break
        first_token_s = time.monotonic() - started_s
        response.read()
        connection.request("GET", "/timeline")
        timeline = json.loads(connection.getresponse().read())
        peak = _peak_mb(process.pid)
    finally:
        process.terminate()
        process.wait()
    return {"first_token_s": first_token_s, "peak_mb": peak, "timeline": timeline}


def _transformers(endpoint: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", TRANSFORMERS, endpoint, "models", "plain/", directory, PROMPT]
        started_s = time.monotonic()
        process = subprocess.Popen(
            command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        if not any(line.startswith("TOKEN") for line in process.stdout):
            raise SystemExit("transformers did not answer")
        first_token_s = time.monotonic() - started_s
        _, _, usage = os.wait4(process.pid, 0)
    return {"first_token_s": first_token_s, "peak_mb": usage.ru_maxrss * 1024 / 1e6}


def _environment() -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _connect(port: int, process: subprocess.Popen[bytes]) -> http.client.HTTPConnection:
    while process.poll() is None:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            time.sleep(0.002)
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = sock
        return connection
    raise SystemExit(f"the server ended with {process.returncode}")


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _report(
    options: argparse.Namespace, wire: dict[str, float], samples: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    results = {
        name: {
            "first_token_s": statistics.median(sample["first_token_s"] for sample in rows),
            "all_s": [round(sample["first_token_s"], 3) for sample in rows],
            "peak_mb": max(sample["peak_mb"] for sample in rows),
        }
        for name, rows in samples.items()
    }
    return {
        "benchmark": "cold_start",
        "command": " ".join(["python -m benchmarks.cold_start", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "name": f"{os.cpu_count()}-core-{platform.machine()}",
            "python": platform.python_version(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "model": options.like,
        "rate_mb_s": options.rate_mb_s,
        "latency_ms": options.latency_ms,
        "rounds": options.rounds,
        "stored_bytes": wire,
        "wire_s": {name: size_bytes / (options.rate_mb_s * 1e6) for name, size_bytes in wire.items()},
        "results": results,
    }


if __name__ == "__main__":
    main()
