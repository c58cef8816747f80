"""The figures of the README (between its `figures` marks), of `docs/benchmarks.md` (`benchmark`), of the stories in
`docs/stories/` (`figures`) and of `docs/draft.md` (`draft`), from the latest results.

    python -m benchmarks.readme [--check]

Figures come from `cold_start`, `starts`, `standby` and `hot`; the page has those of `draft`, `throughput` and `prefix`,
too, where there are results of them. Any page may have a figure in a sentence or a cell, by its name in `named`:

    the first token came after <!--=cold.teneral-->3.42 s<!--/-->.

With `--check` nothing is written, and the exit code is 1 when a page and the results differ.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.cold_start import BASE, PACKED, PLAIN, STANDBY
from benchmarks.draft import AHEAD, DRAFT, WITHOUT, wire_s
from benchmarks.draft_picture import nearest
from benchmarks.hot import ratios
from benchmarks.report import RESULTS, newest, table, where
from benchmarks.stories import aws_lambda, fine_tunes, kubernetes
from benchmarks.throughput import BASE as RUNAI
from benchmarks.throughput import import_during

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
STORIES = ROOT / "docs" / "stories"
DRAFTS = ROOT / "docs" / "draft.md"
NAMED = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)
_STORIES = {"lambda.md": aws_lambda, "scale-to-zero.md": kubernetes, "fine-tunes.md": fine_tunes}
RATE_MB_S = 200.0
IMPORT_TORCH = "import torch"
LLAMA_SERVER = "llama.cpp's server, bf16"
NATIVE_SINCE = "2026-11-23"  # results of earlier days were computed by torch
# Results of `hot` next to the plain one, which has every peer.
_HOT_VARIANTS = {
    "amx": "on a processor with AMX",
    "avx2": "as on a processor with AVX2 alone",
    "busy-1": "next to a process that is always busy",
}
_OVER = {"http": "HTTP", "tls": "TLS", "file": "local files"}
DRAFT_RATE_MB_S = 100.0  # where there is time to draft ahead before importing torch has decided everything


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="report whether the pages agree with the results; write nothing"
    )
    options = parser.parse_args()
    stale = False
    stories = [(STORIES / page, "figures", story(module)) for page, module in _STORIES.items()]
    tables = [(README, "figures", figures()), (PAGE, "benchmark", section()), *stories]
    tables.append((DRAFTS, "draft", draft_rates(newest("draft"))))
    values = named()
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        before = page.read_text(encoding="utf-8")
        after = with_named(before, values, str(page.relative_to(ROOT)))
        for _, mark, text in [each for each in tables if each[0] == page]:
            after = filled(after, mark, text)
        if options.check and before != after:
            print(
                f"the figures of {page.relative_to(ROOT)} are not those of the latest results",
                file=sys.stderr,
            )
            stale = True
        elif before != after:
            page.write_text(after, encoding="utf-8")
    return int(stale)


def figures() -> str:
    """The README's table: one row a promise, each with its peer."""
    cold = newest("cold_start")
    link = nearest(cold["results"], RATE_MB_S)
    packed, base = link["systems"][PACKED]["first_token_s"], link["systems"][BASE]["first_token_s"]
    wire_s = link["wire_s"]["packed"]
    rows = [
        [
            f"cold container, {_params(cold)} model, S3 at {link['rate_mb_s']:g} MB/s: first token",
            f"{packed:.2f} s, {packed / wire_s:.2f}x its bytes' time on the wire",
            f"{base:.2f} s: {BASE}",
            _day(cold),
        ]
    ]
    start, waiting = newest("starts"), newest("standby")
    peer = f"{start['results'][LLAMA_SERVER]['first_token_s']:.2f} s: {LLAMA_SERVER}"
    local, taken = start["results"]["teneral, plain"], waiting["results"]["standby, plain"]
    rows.append(
        [
            "the same model in a local folder, plain: first token over HTTP",
            f"{local['first_token_s']:.2f} s",
            peer,
            _day(start),
        ]
    )
    # llama.cpp has no standby: what it does instead is to start.
    rows.append(
        [
            "the same, taken over by a standby process",
            f"{taken['first_token_s']:.2f} s",
            peer,
            f"{_day(waiting)}, peer {_day(start)}",
        ]
    )
    warm, amx = newest("hot"), newest("hot", "amx")
    most = str(max(warm["batches"]))
    for what, report, size, own, other in (
        ("bf16, one answer", warm, "1", "teneral bf16", "llama.cpp BF16"),
        (f"bf16, {most} answers at once", warm, most, "teneral bf16", "llama.cpp BF16"),
        ("int4, one answer, on an Intel processor with AMX", amx, "1", "teneral int4", "llama.cpp Q4_0"),
    ):
        ours, theirs = (report["results"][name]["decode"][size] for name in (own, other))
        rows.append([f"warm, tokens/s: {what}", f"{ours:.0f}", f"{theirs:.0f}: {other}", _day(report)])
    columns = [f"{start['machine']['cores']} shared cores, no GPU", "Teneral", "peer", "measured"]
    return table(columns, rows) + "\n"


def section() -> str:
    """The page's tables."""
    parts = [cold_start(newest("cold_start"))]
    if any(RESULTS.glob("starts-*.json")):
        parts.insert(0, starts(newest("starts")))
    if any(RESULTS.glob("draft-*.json")):
        parts.append(draft(newest("draft")))
    if any(RESULTS.glob("standby-*.json")):
        parts.append(standby(newest("standby")))
    if any(RESULTS.glob("throughput-*.json")):
        parts.append(throughput(newest("throughput")))
    if any(RESULTS.glob("hot-*.json")):
        parts.append(hot(newest("hot")))
        parts += [
            hot_variant(newest("hot", variant), words)
            for variant, words in _HOT_VARIANTS.items()
            if any(RESULTS.glob(f"hot-{variant}-*.json"))
        ]
    if any(RESULTS.glob("prefix-*.json")):
        parts.append(prefix(newest("prefix")))
    return "\n\n".join(parts) + "\n"


def story(module: Any) -> str:
    """A story's own run; empty until one was kept."""
    name = module.NAME.replace("_", "-")
    return f"\n{module.section(newest(module.NAME))}\n" if any(RESULTS.glob(f"{name}-*.json")) else ""


def filled(page: str, mark: str, text: str) -> str:
    """The page with this text between two marks of a name. Raises SystemExit without both marks."""
    first, last = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"a page has no {first.strip()} … {last}")
    return f"{head}{begin}{text}{end}{tail}"


def named() -> dict[str, str]:
    """The figures that sentences of any page may have, by name, as text with their units."""
    link = nearest(newest("cold_start")["results"], RATE_MB_S)
    ours_s, wire = link["systems"][PACKED]["first_token_s"], link["wire_s"]
    sent = nearest(newest("draft")["results"], DRAFT_RATE_MB_S)["wire_s"]
    stored = newest("cold_start")["stored_bytes"]
    values = {
        "cold.teneral": f"{ours_s:.2f} s",
        "cold.of-wire": f"{ours_s / wire['packed']:.2f}",
        "cold.wire": f"{wire['packed']:.2f} s",
        "cold.transformers": f"{link['systems'][BASE]['first_token_s']:.2f} s",
        "cold.packed": f"{stored['packed'] / 1e6:.0f} MB",
        "cold.plain": f"{stored['plain'] / 1e6:.0f} MB",
        "draft.of-sent": f"{sent['draft'] / sent['packed']:.0%}".replace("%", " %"),
        "draft.of-original": f"{sent['draft'] / sent['plain']:.0%}".replace("%", " %"),
    }
    firsts = {"cold": link["systems"]}
    firsts |= {benchmark: newest(benchmark)["results"] for benchmark in ("starts", "standby", "prefix")}
    for short, results in firsts.items():
        for system, row in results.items():
            values.setdefault(f"{short}.{_slug(system)}", f"{row['first_token_s']:.2f} s")
    for over, results in newest("throughput")["results"].items():
        for system, row in results.items():
            values[f"throughput.{over}.{_slug(system)}"] = f"{row['gb_s']:.2f} GB/s" if "gb_s" in row else "–"
    for benchmark in ("cold_start", "starts", "standby", "prefix", "pool", "fine_tune", "throughput", "hot"):
        values[f"{benchmark.replace('_', '-')}.day"] = _day(newest(benchmark))
    return values | _of_pools(newest("pool")["results"]) | _of_fine_tunes(newest("fine_tune")) | _of_hot()


def _of_hot() -> dict[str, str]:
    """`hot-amx.teneral-int8-llama.cpp-q8_0.answers-batch-1`: ours relative to a rival, as in the tables."""
    values = {}
    for variant in ("", *_HOT_VARIANTS):
        report = newest("hot", variant)
        short = f"hot-{variant}" if variant else "hot"
        values[f"{short}.day"] = _day(report)
        for name, *cells in ratios(report):
            for column, cell in zip(_hot_columns(report), cells, strict=True):
                values[f"{short}.{_slug(name)}.{_slug(column)}"] = cell
    return values


def _of_pools(results: dict[str, Any]) -> dict[str, str]:
    values = {
        f"pool.{model}-{point}": f"{results[f'swap {model}'][f'{point}_s']:.2f} s"
        for model in ("demo", "like")
        for point in ("p50", "p95", "most")
    }
    front = results["front"]
    return values | {
        "pool.front-p50": f"{(front['pool']['p50_s'] - front['direct']['p50_s']) * 1e3:.1f} ms",
        "pool.front-cores": f"{front['stream']['cores_at_2000']:.2f}",
        "pool.kept": f"{results['kv']['ratio']:.2f}x",
        "pool.burst": f"{results['burst']['ratio']:.2f}x",
    }


def _of_fine_tunes(report: dict[str, Any]) -> dict[str, str]:
    stored = report["stored_bytes"]
    read_bytes = {"whole, cold": stored["whole"], "based, cold": stored["base"] + stored["tuned"]}
    values = {}
    for system, times_s in report["results"].items():
        name, median_s = f"tune.{_slug(system)}", statistics.median(times_s)
        wire_s = read_bytes.get(system, stored["tuned"]) / report["rate_mb_s"] / 1e6
        values[name] = f"{median_s:.2f}"
        values[f"{name}-range"] = f"{min(times_s):.2f}–{max(times_s):.2f}"
        values[f"{name}-of-wire"] = f"{median_s / wire_s:.2f}x"
    return values


def _slug(system: str) -> str:
    """`standby-packed-3-at-once` of `standby, packed, 3 at once`."""
    return re.sub(r"[^\w.]+", "-", system).strip("-").lower()


def with_named(page: str, values: dict[str, str], place: str) -> str:
    """The page with each named figure as it is now. Raises SystemExit for a name that is not there."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise SystemExit(
                f"{place}: no figure is named {found[1]}: benchmarks/readme.py has those that are"
            )
        return f"<!--={found[1]}-->{values[found[1]]}<!--/-->"

    return NAMED.sub(value, page)


def starts(report: dict[str, Any]) -> str:
    """The table of starts with the model on the node."""
    results = report["results"]
    torch_s = results[IMPORT_TORCH]["first_token_s"]
    rows = [
        [name, f"{row['first_token_s']:.2f}", f"{row['first_token_s'] / torch_s:.2f}x"]
        for name, row in results.items()
    ]
    return (
        "From starting a process to its first answer, with the model in a local folder. `teneral serve` answers over\n"
        f"HTTP (the demo's model, the shape of {report['model']}, an embedding of MiniLM's shape), onnxruntime prints\n"
        f"without a server; {_where(report)}:\n\n"
        f"{table(['', 'first answer, s', 'of `import torch`'], rows)}"
    )


def cold_start(report: dict[str, Any]) -> str:
    """The table at one rate, and the picture over all of them."""
    link = nearest(report["results"], RATE_MB_S)
    systems = link["systems"]
    base_s = systems[BASE]["first_token_s"] if BASE in systems else None
    rows = []
    for name, row in systems.items():
        time_s = row["first_token_s"]
        wire_s = link["wire_s"]["packed" if "packed" in name else "plain"]
        sooner = f"{base_s / time_s:.1f}x" if base_s and name != BASE else "–"
        peak = report["memory"].get(name, {}).get("peak_pss_mb")
        cells = [f"{time_s:.2f}", f"{time_s / wire_s:.2f} x {wire_s:.2f} s", sooner]
        rows.append([_shown(name), *cells, f"{peak:,.0f}" if peak else "–"])
    sizes = " and ".join(
        f"{report['stored_bytes'][way] / 1e6:.0f} MB {words}"
        for way, words in (("plain", "as safetensors"), ("packed", "packed"))
    )
    columns = [
        "",
        "first token, s",
        "relative to its bytes' time on the wire",
        f"sooner than {BASE}",
        "peak MB",
    ]
    return (
        f"From starting a process to its first token, for a model of {report['model']}'s shape ({sizes}) in an S3\n"
        f"store behind {link['rate_mb_s']:g} MB/s with {report['latency_ms']:g} ms to the first byte,\n"
        f"{_where(report)}:\n\n"
        f"{table(columns, rows)}\n\n"
        "![Cold start by the link's rate, one line a system](cold-start.svg)\n\n"
        "The picture is made by `python -m benchmarks.picture` from the same results."
    )


def draft(report: dict[str, Any]) -> str:
    """The table at one rate, and the picture at the same."""
    link = nearest(report["results"], DRAFT_RATE_MB_S)
    rows = []
    for name, row in link["systems"].items():
        limit_s, sent_bytes = wire_s(link, name), row["sent_bytes"]
        judged = row["num_accepted"] + row["num_rejected"]
        rows.append(
            [
                _shown(name),
                f"{row['first_token_s']:.2f}",
                f"{row['first_token_s'] / limit_s:.2f} x {limit_s:.2f} s",
                f"{row['last_token_s']:.2f}",
                "–" if sent_bytes is None else f"{sent_bytes / 1e6:,.0f}",
                f"{row['num_drafted']:.0f}" if name == DRAFT else "–",
                f"{row['num_accepted']:.0f} of {judged:.0f}" if name == AHEAD else "–",
            ]
        )
    nth = f"token {report['num_tokens']}, s"
    columns = [
        "",
        "first token, s",
        "relative to the wire",
        nth,
        "MB sent by the first",
        "drafted",
        "accepted",
    ]
    return (
        f"The same over {link['rate_mb_s']:g} MB/s with {report['num_tokens']} tokens, and the draft tier's gain"
        f" ([draft.md](draft.md)),\n{_where(report)}.\nWeights: {report['weights']}"
        f" ([draft-quality.md](draft-quality.md) is about real ones).\n\n"
        f"{table(columns, rows)}\n\n"
        "![Tokens received over time, one line a system](draft.svg)"
    )


def draft_rates(report: dict[str, Any]) -> str:
    """First and last token of each system, one column a rate."""
    shown = {DRAFT: "drafts sent", AHEAD: "exact", WITHOUT: "exact without any draft", BASE: BASE}
    rows = []
    for system, words in shown.items():
        rows.append([f"{words}, first token"])
        rows.append([f"{words}, token {report['num_tokens']}"])
        for link in report["results"]:
            row = link["systems"][system]
            of_wire = row["first_token_s"] / wire_s(link, system)
            rows[-2].append(f"{row['first_token_s']:.2f} ({of_wire:.2f}x)")
            rows[-1].append(f"{row['last_token_s']:.2f}")
    rates = [f"{link['rate_mb_s']:g} MB/s" for link in report["results"]]
    return (
        f"A model of {report['model'].removesuffix('-agreeing')}'s shape in an S3 store,\n"
        f"{_where(report)}.\nSeconds from starting the process, in brackets relative to the transfer time of\n"
        f"the bytes that the token needs:\n\n{table(['', *rates], rows)}\n"
    )


def standby(report: dict[str, Any]) -> str:
    """One row a way of starting with the model on the node."""
    base_s = report["results"]["transformers"]["first_token_s"]
    rows = [
        [name, f"{row['first_token_s']:.2f}", f"{row['first_token_s'] / base_s:.2f}x"]
        for name, row in report["results"].items()
    ]
    lead = f"With the model on the node already, {_where(report)}:"
    return f"{lead}\n\n{table(['', 'first token, s', 'relative to transformers'], rows)}"


def throughput(report: dict[str, Any]) -> str:
    """One row a system and a way to the bytes: weights alone, with a process's start where it has its own; and what a
    load and an import of torch cost each other.
    """
    rows = []
    for over, results in report["results"].items():
        base = results.get(RUNAI)
        for name, row in results.items():
            if "peak_pss_mb" not in row:
                continue
            relative = "–"
            if base and name != RUNAI:
                speed, cpu = row["gb_s"] / base["gb_s"], row["cpu_s_a_gb"] / base["cpu_s_a_gb"]
                relative = f"{speed:.1f}x, {cpu:.2f}x"
            cells = [f"{row['gb_s']:.2f}", f"{row['cpu_s_a_gb']:.2f}", relative, f"{row['peak_pss_mb']:,.0f}"]
            rows.append([f"{name}, {_OVER[over]}", *cells])
    columns = ["", "GB/s of weights", "CPU-s a GB", f"both relative to {RUNAI}", "peak MB"]
    lead = (
        f"Loading alone, without a limit on the link, {_where(report)}. All but a standby with memory take\n"
        "theirs from the system while the clock runs; files are in the page cache, where safetensors maps them:"
    )
    text = f"{lead}\n\n{table(columns, rows)}"
    columns = ["`import torch` while weights are loaded", "s", "relative to the import alone", "load, GB/s"]
    imports = [
        cells[: len(columns)]
        for over, results in report["results"].items()
        for cells in import_during(over, results)
    ]
    return f"{text}\n\n{table(columns, imports)}" if imports else text


def hot(report: dict[str, Any]) -> str:
    """One row an engine: tokens a second of answers, for each size of batch, and of prompts."""
    rows = [
        [
            name.replace("teneral", "**teneral**"),
            *(f"{rate:.3g}" for rate in row["decode"].values()),
            *(f"{rate:.0f}" for rate in row["prefill"].values()),
            *["–"] * (len(report["prompts"]) - len(row["prefill"])),
            f"{row['bandwidth_share']:.0%}",
        ]
        for name, row in report["results"].items()
    ]
    cells = _hot_columns(report)
    columns = ["tokens a second", *cells, "of the bandwidth"]
    return (
        f"A warm engine, without HTTP, on the same random weights and {report['threads']} threads, {_where(report)}. "
        f"Memory was read at {report['bandwidth_gb_s']:.1f} GB/s; the last column is what of\n"
        "that a single answer's weights take:\n\n"
        f"{table(columns, rows)}\n\n"
        f"{table(['relative to', *cells], ratios(report))}"
    )


def hot_variant(report: dict[str, Any], words: str) -> str:
    """One row a precision and rival: Teneral's rates relative to the rival's."""
    rows = ratios(report)
    lead = f"The same {words}, {_where(report)}:"
    return f"{lead}\n\n{table(['relative to', *_hot_columns(report)], rows)}"


def _hot_columns(report: dict[str, Any]) -> list[str]:
    answers = [f"answers, batch {size}" for size in report["batches"]]
    return [*answers, *(f"prompt of {size}" for size in report["prompts"])]


def prefix(report: dict[str, Any]) -> str:
    """One row a place where the beginning of a prompt was found."""
    new_s = report["results"]["new"]["first_token_s"]
    rows = [
        [
            name,
            f"{row['first_token_s']:.2f}",
            f"{row['first_token_s'] / new_s:.2f}x",
            f"{row['found_tokens']:.0f}",
        ]
        for name, row in report["results"].items()
    ]
    tokens = f"{report['prefix_tokens']:,}"
    lead = (
        f"The first token behind a beginning of {tokens} tokens ([kv.md](kv.md)), {_where(report)}; "
        "*exec* counts\nfrom starting the process:"
    )
    return f"{lead}\n\n{table(['', 'first token, s', 'relative to new', 'tokens found'], rows)}"


def _where(report: dict[str, Any]) -> str:
    return where(report, *["before the native core"] * (report["date"] < NATIVE_SINCE))


def _day(report: dict[str, Any]) -> str:
    return str(report["date"][:10])


def _params(report: dict[str, Any]) -> str:
    """`0.5B` of `qwen2.5-0.5b`."""
    return str(report["model"]).rpartition("-")[2].upper()


def _shown(name: str) -> str:
    names = {
        PACKED: "`teneral serve`, packed",
        PLAIN: "`teneral serve`, plain safetensors",
        STANDBY: "`teneral serve`, packed, from a standby process",
        DRAFT: "`teneral serve --first-token draft`",
        AHEAD: "`teneral serve`: exact, with proposals of the draft",
        WITHOUT: "`teneral serve --no-draft-ahead`",
    }
    return names.get(name, name.replace("teneral,", "`teneral serve`,"))


if __name__ == "__main__":
    raise SystemExit(main())
