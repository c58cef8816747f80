"""The Grafana dashboards of `infra/dashboards/`, as data.

python -m teneral.infra.render.dashboard infra/dashboards     # after a change here; a test compares
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA_VERSION = 39  # of Grafana's dashboard model; 10.1 and newer read it
WIDTH, HEIGHT = 12, 8  # of a panel, of 24 columns
SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """A graph: queries by the legend of their lines."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def _quantile(name: str, share: float, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{{$of}}[$__rate_interval])))"


def _rate(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{$of{more}}}[$__rate_interval]))"


SERVER = (
    Panel("Requests", "reqps", {"{{status}}": _rate("teneral_requests_total", "status", ',route!~"/(metrics|livez|readyz|health|ping)"')}),
    Panel("Time of a request", "s", {"p50": _quantile("teneral_request_seconds", 0.5), "p99": _quantile("teneral_request_seconds", 0.99)}),
    Panel(
        "Time to the first token",
        "s",
        {"p50": _quantile("teneral_first_token_seconds", 0.5), "p99": _quantile("teneral_first_token_seconds", 0.99)},
        "From a request's arrival; a cold start is part of it.",
    ),
    Panel("Time between tokens", "s", {"p50": _quantile("teneral_inter_token_seconds", 0.5), "p99": _quantile("teneral_inter_token_seconds", 0.99)}),
    Panel("Tokens", "short", {"prompts": _rate("teneral_prompt_tokens_total", "job"), "generated": _rate("teneral_generated_tokens_total", "job")}),
    Panel("In work and waiting", "short", {"in work": "sum(teneral_engine_running{$of})", "waiting": "sum(teneral_engine_queued{$of})"}),
    Panel("Wait for the engine", "s", {"p50": _quantile("teneral_queue_seconds", 0.5), "p99": _quantile("teneral_queue_seconds", 0.99)}, "A sequence's wait for its first step."),
    Panel("Tokens of a sequence, p90", "short", {"prompt": _quantile("teneral_sequence_prompt_tokens", 0.9), "generated": _quantile("teneral_sequence_generated_tokens", 0.9)}),
    Panel("Memory of the process", "bytes", {"{{instance}}": "process_resident_memory_bytes{$of}"}),
    Panel("State", "short", {"{{state}}": "sum by (state) (teneral_state{$of})"}, "Servers in each state: loading, partial, ready, draining."),
    Panel("Cold requests", "short", {"cold": "sum(increase(teneral_cold_requests_total{$of}[$__rate_interval]))"}),
    Panel("Load", "percentunit", {"{{instance}}": "max by (instance) (teneral_progress_fraction{$of})"}, "Share of the weights that is exact."),
    Panel("Link to the store", "Bps", {"{{instance}}": "max by (instance) (teneral_load_link_rate_bytes_per_s{$of})"}),
    Panel(
        "Prompt tokens found in the KV pool",
        "percentunit",
        {
            "found": "sum(rate(teneral_engine_prefix_hit_tokens_total{$of}[$__rate_interval]))"
            " / sum(rate(teneral_engine_prefix_lookup_tokens_total{$of}[$__rate_interval]))"
        },
    ),
    Panel("Adapters", "short", {"in memory": "sum(teneral_adapters_loaded{$of})", "wait for room": "sum(teneral_adapters_waiting_for_room{$of})"}, "Where --adapters is set."),
    Panel(
        "Requests for adapters",
        "reqps",
        {
            "in memory": "sum(rate(teneral_adapters_hits_total{$of}[$__rate_interval]))",
            "read": "sum(rate(teneral_adapters_misses_total{$of}[$__rate_interval]))",
            "made way": "sum(rate(teneral_adapters_evictions_total{$of}[$__rate_interval]))",
            "failed": "sum(rate(teneral_adapters_failures_total{$of}[$__rate_interval]))",
        },
        "Adapters that had to be read, and others that made way for them.",
    ),
    Panel("Free blocks of the KV pool", "percentunit", {"{{instance}}": "teneral_engine_free_blocks{$of} / teneral_engine_num_blocks{$of}"}),
)  # fmt: skip
POOL = (
    Panel("Instances", "short", {"{{model}} {{state}}": "sum by (model, state) (teneral_pool_instances{$of})"}),
    Panel("Wanted", "short", {"{{model}}": "sum by (model) (teneral_pool_desired{$of})"}),
    Panel("Requests", "reqps", {"{{model}} {{status}}": _rate("teneral_requests_total", "model, status")}),
    Panel("Waiting for an instance", "short", {"{{model}}": "sum by (model) (teneral_pool_waiting{$of})"}),
    Panel("Wait for an instance", "s", {"p50": _quantile("teneral_pool_wait_seconds", 0.5), "p99": _quantile("teneral_pool_wait_seconds", 0.99)}),
    Panel(
        "Share of cold requests",
        "percentunit",
        {"{{model}}": f"{_rate('teneral_cold_requests_total', 'model')} / {_rate('teneral_requests_total', 'model')}"},
    ),
    Panel("Starts", "short", {"{{model}} {{kind}} {{outcome}}": _rate("teneral_starts_total", "model, kind, outcome")}),
    Panel("Time of a start", "s", {"{{kind}}": _quantile("teneral_start_seconds", 0.9, "kind")}, "90th percentile, by kind."),
    Panel("Memory", "bytes", {"{{kind}}": "sum by (kind) (teneral_pool_memory_bytes{$of})"}, "The budget, what is used, and what starts have reserved."),
    Panel("Evictions", "short", {"{{reason}}": _rate("teneral_pool_evictions_total", "reason")}),
    Panel("Copies to shadows", "reqps", {"{{outcome}}": _rate("teneral_shadow_total", "outcome")}),
)  # fmt: skip
DASHBOARDS = {"teneral": ("Teneral: servers", SERVER), "pool": ("Teneral: pools", POOL)}


def dashboard(uid: str) -> dict[str, Any]:
    """Grafana's JSON of one dashboard. The variable `job` chooses among scraped jobs."""
    title, panels = DASHBOARDS[uid]
    return {
        "uid": uid,
        "title": title,
        "tags": ["teneral"],
        "schemaVersion": SCHEMA_VERSION,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _job_variable(panels)]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def queries(uid: str) -> list[str]:
    """All queries of a dashboard, with Grafana's variables replaced, for a Prometheus to check."""
    _, panels = DASHBOARDS[uid]
    written = [query for panel in panels for query in panel.queries.values()]
    return [query.replace("$of", 'job=~".+"').replace("$__rate_interval", "1m") for query in written]


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _job_variable(panels: tuple[Panel, ...]) -> dict[str, Any]:
    metric = "teneral_pool_desired" if panels is POOL else "teneral_state"
    query = f"label_values({metric}, job)"
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "job"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query.replace("$of", 'job=~"$job"'),
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text_of(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=1) + "\n"


def main(folder: str) -> None:
    for uid in DASHBOARDS:
        Path(folder, f"{uid}.json").write_text(text_of(uid), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
