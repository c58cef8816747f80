"""Time from `exec` to the first token of a model of the Hub, streamed and from the Hub's local cache.

    python -m benchmarks.hub [--rounds 5] [--rate-mb-s 200] [--latency-ms 15] [--only PATTERN] [--save]

The Hub is a server of the tests in a process of its own. It redirects large files to another, its
content network, which paces all connections together. `serve org/model` reads the model over both;
with `--no-verify-files` it does not compare it with the SHA-256 that the Hub states. `s3://` is the
same bytes in a bucket at the same rate. From the Hub's cache (`HF_HOME`, links to the same files),
a start has no network, and is compared with one from the folder itself. Every row is one new
process; rows take turns.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks import cold_starts
from benchmarks.cold_starts import ColdStart
from benchmarks.processes import environment
from benchmarks.report import begin, finish, median, new_parser, table, title
from benchmarks.rounds import Start, Turns, failures, selected
from benchmarks.store import StoreProcess, prepare, stored_bytes, warm

NAME = "org/model"
COMMIT = "0" * 40
STREAMED, UNCHECKED, BUCKET = "Hub", "Hub, --no-verify-files", "s3://"
CACHED, FOLDER = "Hub's cache", "folder"
GOALS = {STREAMED: 1.05, CACHED: 1.10}  # of the time on the wire, of the folder's


class HubProcess:
    """A Hub with one model, whose large files are at `content_url`, as a context manager."""

    def __init__(self, folder: Path, content_url: str) -> None:
        command = [sys.executable, "-m", "tests.support.hub_server", NAME, str(folder)]
        self._process = subprocess.Popen(
            [*command, "--content-url", content_url], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise SystemExit("the Hub did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    folder = root / "models" / "plain"
    home = options.work / options.like / "hub-home"
    _fill_content(folder, root / "content")
    _fill_cache(folder, home)
    report = begin(
        "hub",
        model=options.like,
        rounds=options.rounds,
        rate_mb_s=options.rate_mb_s,
        latency_ms=options.latency_ms,
        wire_s=stored_bytes(root)["plain"] / (options.rate_mb_s * 1e6),
        goals=GOALS,
    )
    with (
        StoreProcess(root, rate_mb_s=options.rate_mb_s, latency_ms=options.latency_ms) as store,
        HubProcess(folder, f"{store.url}/content") as hub,
    ):
        away = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home.with_name("hub-empty")), "HF_HUB_OFFLINE": ""}
        systems: dict[str, Start] = {
            STREAMED: _serve(NAME, away),
            UNCHECKED: _serve(NAME, away, "--no-verify-files"),
            BUCKET: _serve("s3://models/plain", store.environment()),
            CACHED: _serve(NAME, {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}),
            FOLDER: _serve(str(folder), {}),
        }
        turns = Turns(selected(systems, options.only), before=partial(warm, root))
        report["results"] = {name: summary(rows) for name, rows in turns.run(options.rounds).items()}
    report["failed"] = turns.failed
    finish(report, render(report), save=options.save)


def _serve(address: str, variables: dict[str, str], *flags: str) -> Start:
    def start(watch: bool) -> ColdStart:
        return cold_starts.serve(address, *flags, variables=variables, watch=watch, wants_timeline=True)

    return start


def _fill_content(folder: Path, bucket: Path) -> None:
    """The content network's files, by their SHA-256."""
    bucket.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.safetensors"), folder / "tokenizer.json"):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not (bucket / digest).exists():
            os.link(path, bucket / digest)


def _fill_cache(folder: Path, home: Path) -> None:
    """The model in the Hub's cache, as `hf download` lays it down: links to blobs."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.rmtree(home, ignore_errors=True)
    for name in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(folder.iterdir())):
        os.link(path, repository / "blobs" / str(number))
        (repository / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{number}")


def summary(samples: list[ColdStart]) -> dict[str, Any]:
    rows = [{"first_token_s": sample.first_token_s, **_course(sample)} for sample in samples]
    return {
        **{figure: median(rows, figure) for figure in ("first_token_s", "exact_s", "check_s")},
        "all_s": [round(row["first_token_s"], 3) for row in rows],
    }


def _course(sample: ColdStart) -> dict[str, float]:
    """When the load was exact, and for how long files were compared with their digests."""
    assert sample.timeline is not None
    spans = sample.timeline["spans"]
    (load,) = (span for span in spans if (span["lane"], span["name"]) == ("fetch", "load"))
    checks = [span for span in spans if span["lane"] == "verify" and span["name"].endswith(".safetensors")]
    return {"exact_s": load["end_s"], "check_s": sum(span["end_s"] - span["start_s"] for span in checks)}


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    results: dict[str, dict[str, Any]] = report["results"]
    bases = {CACHED: results.get(FOLDER, {}).get("first_token_s")}
    rows = []
    for name, row in results.items():
        base = bases.get(name, None if name == FOLDER else report["wire_s"])
        goal = report["goals"].get(name)
        rows.append(
            [
                name,
                f"{row['first_token_s']:.2f}",
                f"{min(row['all_s']):.2f}–{max(row['all_s']):.2f}",
                f"{row['first_token_s'] / base:.3f}x" if base else "–",
                f"{goal:.2f}x" if goal else "–",
                f"{row['exact_s']:.2f}",
                f"{row['check_s']:.2f}",
            ]
        )
    link = f"{report['rate_mb_s']:g} MB/s, {report['latency_ms']:g} ms to the first byte"
    wire = f"{report['wire_s']:.2f} s on the wire"
    words = [report["model"], link, wire, f"medians of {report['rounds']} rounds, in turns"]
    columns = [
        "exec → first token",
        "s",
        "from–to",
        "of the wire, of the folder",
        "goal",
        "exact, s",
        "check, s",
    ]
    return "\n".join([title(report, *words), table(columns, rows), failures(report["failed"])])


if __name__ == "__main__":
    main()
