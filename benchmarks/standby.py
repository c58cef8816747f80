"""Cold starts with the model on the node, and from standby processes, against transformers' default.

    python -m benchmarks.standby [--rounds 5] [--only PATTERN] [--save]

From starting a process to its first token, with the model in a local folder whose files are in the page cache:
`transformers` as everybody starts it, `teneral serve` on the plain and the packed model, and the same from a process
of a standby pool (`teneral standby`), counted from starting the `teneral serve` that asks for it; the pool is full
then, and in some rows holds memory for the weights ahead (`--memory`). Rows with a node cache fetch the packed model
from a store at 200 MB/s through one that an earlier start has filled. Rows of several starts at once show the slowest
of them; the pool holds one process then, too. Runs take turns. The goal of a standby is 0.15x of transformers, and of
the slowest of three starts twice the time of one alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks import cold_starts, peer_environment
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import Start, Turns, at_once, failures, selected
from benchmarks.store import StoreProcess, prepare, warm

BASE = "transformers"
GOAL = 0.15
AT_ONCE = 3


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument(
        "--rate-mb-s", type=float, default=200.0, help="MB/s of the store behind the node cache"
    )
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    peers = peer_environment.find(options.work)
    report = begin(
        "standby",
        model=options.like,
        rate_mb_s=options.rate_mb_s,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        goal=GOAL,
        peers=peers.versions,
    )
    cache = options.work / "standby-cache"
    shutil.rmtree(cache, ignore_errors=True)
    try:
        with (
            StoreProcess(root, rate_mb_s=options.rate_mb_s, latency_ms=options.latency_ms) as store,
            cold_starts.StandbyPool(options.work) as pool,
            cold_starts.StandbyPool(options.work, memory_bytes=_weights_bytes(root / "models")) as ahead,
        ):
            systems = _systems(root / "models", cache, store.environment(), pool, ahead, peers)
            turns = Turns(selected(systems, options.only), before=lambda: warm(root))
            if any("cache" in name for name in turns.systems):
                _fill(cache, store.environment())
            report["results"] = turns.time(options.rounds)
            report["memory"] = turns.weigh()
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    report["failed"] = turns.failed
    finish(report, render(report), save=options.save)


def _systems(
    models: Path,
    cache: Path,
    variables: dict[str, str],
    pool: cold_starts.StandbyPool,
    ahead: cold_starts.StandbyPool,
    peers: peer_environment.PeerEnvironment,
) -> dict[str, Start]:
    def serve(model: str, *flags: str, pool: cold_starts.StandbyPool | None = None) -> Start:
        return lambda watch: cold_starts.serve(model, *flags, variables=variables, watch=watch, pool=pool)

    plain, packed = str(models / "plain"), str(models / "packed")
    cached = ("s3://models/packed", "--cache-dir", str(cache))
    return {
        BASE: lambda watch: cold_starts.peer("local", plain, peers=peers, variables=variables, watch=watch),
        "teneral, plain": serve(plain),
        "teneral, packed": serve(packed),
        "teneral, packed, node cache": serve(*cached),
        "standby, plain": serve(plain, pool=pool),
        "standby, packed": serve(packed, pool=pool),
        "standby, packed, node cache": serve(*cached, pool=pool),
        f"standby, plain, {AT_ONCE} at once": at_once(serve(plain, pool=pool), AT_ONCE),
        f"standby, packed, {AT_ONCE} at once": at_once(serve(packed, pool=pool), AT_ONCE),
        f"teneral, plain, {AT_ONCE} at once": at_once(serve(plain), AT_ONCE),
        "standby with memory, plain": serve(plain, pool=ahead),
        "standby with memory, packed": serve(packed, pool=ahead),
        "standby with memory, packed, node cache": serve(*cached, pool=ahead),
    }


def _weights_bytes(models: Path) -> int:
    """The bytes of the model's weights, and a margin."""
    return sum(path.stat().st_size for path in (models / "plain").glob("*.safetensors")) + (1 << 20)


def _fill(cache: Path, variables: dict[str, str]) -> None:
    """Start until the cache holds every part: what is written while the store is fast may be dropped."""
    before = -1
    while (size_bytes := _size_bytes(cache)) > before:
        before = size_bytes
        try:
            cold_starts.serve(
                "s3://models/packed", "--cache-dir", str(cache), variables=variables, settle_s=1.0
            )
        except RunError as error:
            raise SystemExit(f"the node cache could not be filled: {error}") from error
    note(f"the node cache holds {before / 1e6:.0f} MB")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    results = report["results"]
    base = results.get(BASE)
    rows = []
    for name, row in results.items():
        ratio = f"{row['first_token_s'] / base['first_token_s']:.2f}x" if base else "–"
        peak = report["memory"].get(name, {}).get("peak_pss_mb")
        spread = f"{min(row['all_s']):.2f}–{max(row['all_s']):.2f}"
        rows.append([name, f"{row['first_token_s']:.2f}", spread, ratio, f"{peak:,.0f}" if peak else "–"])
    words = [
        report["model"],
        f"medians of {report['rounds']} rounds",
        f"goal of a standby: {report['goal']:g}x",
    ]
    columns = ["exec → first token", "s", "from–to", f"relative to {BASE}", "peak MB"]
    return "\n".join([title(report, *words), table(columns, rows), failures(report["failed"])])


if __name__ == "__main__":
    main()
