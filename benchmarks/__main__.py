"""All benchmarks, one after the other, or some of them: `make bench`.

    python -m benchmarks [NAME …] [--save] [--list]

Each is a command of its own, with options of its own (`python -m benchmarks.cold_start --help`); here they run with
their defaults. Each takes up to fifteen minutes on two cores. Trust figures only from a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.report import note

BENCHMARKS = {
    "cold_start": "exec → first token over links of several rates, with three peers",
    "draft": "exec → first and sixteenth token from the draft tier, and exact with and without drafting ahead",
    "standby": "exec → first token with the model on the node: standby processes, the node cache",
    "pool": "one machine's pool: waking a model, the front's cost, the KV cache after a sleep, starts in a burst",
    "pool_kills": "a pool whose instances are killed: every one of 10,000 answers accounted for, and the budget",
    "pool_plan": "the predictions of `teneral pool plan` against a real pool, and the speed of its search",
    "ray_serve": "Ray Serve: waking a sleeping model, a warm request's cost, prefix affinity (needs Ray)",
    "starts": "exec → first answer, model on the node; llama.cpp's server, onnxruntime, `import torch`",
    "hub": "exec → first token of org/name: streamed, and from the Hub's cache, against the same bytes elsewhere",
    "first_range": "exec → first request at the store",
    "throughput": "GB/s of weights and CPU seconds a GB at full speed, over HTTP, TLS and from files, with the peers",
    "memory": "peak memory of a load, over the same process with no model",
    "load": "a load against a bare read of the same bytes",
    "faults": "a load through stalls, cuts, flips and 503s, against a clean one",
    "node_cache": "the node cache: its cost to the load that fills it, its gain for the next",
    "decode": "decoding alone",
    "hot": "tokens/s of prompts and answers, alone and in batches; llama.cpp, torch and ONNX Runtime",
    "int4": "the loss of int8 and int4 on a real model, and their speed; llama.cpp's Q8_0, Q4_K_M and Q4_0",
    "lookahead": "tokens/s of answers that repeat their prompt, and of free ones, with look-ahead and without",
    "prefix": "exec or request → first token behind a long prefix: new, in the pool, spilled, from a snapshot",
    "adapters": "LoRA: a cold adapter's first token, 8 in a batch, and requests without",
    "experts": "a mixture's first token by the experts that it chooses; with a snapshot; in half of its memory",
    "fine_tune": "a warm server's switch to a fine-tune by its differences; cold with its base, and whole",
    "goodput": "answers in time at up to 10 times the load that saturates the server",
    "products": "the native core's products against torch's, by dtype and number of rows",
    "overhead": "a step and an invocation without a model",
    "invocation": "an invocation of a function that does nothing: HTTP and AWS Lambda; AWS's own runtime",
    "batch": "10,000 prompts as a batch job, killed 20 times and undisturbed: equality and time",
    "structured": "a schema request's first text in a cold start, the cost of grammars, 2,000 answers checked",
    "onnx": "ONNX models: cold behind a link, local, warm, and memory; compared with onnxruntime",
    "stories.aws_lambda": "a function on Lambda: init, first token, after a freeze; and transformers",
    "stories.kubernetes": "scale to zero: rendered containers, started and probed as the platform does",
    "stories.fine_tunes": "a thousand adapters on one base: first tokens, evictions, memory",
    "console": "the console: first paint, bytes, what it explains, the first token with the page open (needs Chromium)",
    "embeddings": "an encoder's batching: texts/s for one and for many callers",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--save", action="store_true", help="keep the results under benchmarks/results/")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}; known are {', '.join(BENCHMARKS)}")
    if options.list:
        for name, words in BENCHMARKS.items():
            print(f"{name:12} {words}")
        return 0
    failed = [name for name in options.names or BENCHMARKS if not _run(name, save=options.save)]
    if failed:
        note(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _run(name: str, *, save: bool) -> bool:
    print(f"\n## {name}: {BENCHMARKS[name]}\n", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    command += ["--save"] if save else []
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
