"""Alerts and dashboards: every metric in them is one that a server or a pool counts, and promtool takes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from teneral.runtime.metrics import Metrics

INFRA = Path(__file__).parents[2] / "infra"
DASHBOARDS = ("teneral", "pool")
RULES = INFRA / "alerts" / "teneral.rules.yml"
ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
ALWAYS = 'group by (model, instance) ({__name__=~".+"})'  # for every series that a test has
PROMTOOL = os.environ.get("TENERAL_TEST_PROMTOOL", "")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="needs promtool: scripts/conformance-infra")
POOL_METRICS = {
    "teneral_pool_desired", "teneral_pool_evictions_total", "teneral_pool_instances", "teneral_pool_memory_bytes",
    "teneral_pool_wait_seconds_bucket", "teneral_pool_waiting", "teneral_shadow_total",
}  # fmt: skip
# Of a server's statistics, which exist only while it serves; `test_serve_metrics` of the slow tests scrapes a real one.
STATISTICS = {
    "teneral_adapters_evictions_total", "teneral_adapters_failures_total", "teneral_adapters_hits_total",
    "teneral_adapters_loaded", "teneral_adapters_misses_total", "teneral_adapters_waiting_for_room",
    "teneral_engine_free_blocks", "teneral_engine_num_blocks", "teneral_engine_prefix_hit_tokens_total",
    "teneral_engine_prefix_lookup_tokens_total", "teneral_engine_queued", "teneral_engine_running",
    "teneral_load_link_rate_bytes_per_s", "teneral_load_unverified_bytes", "teneral_progress_fraction",
}  # fmt: skip


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"teneral_[a-z_]+", text))


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def queries(uid: str) -> list[str]:
    """All queries of a dashboard, with Grafana's variables replaced, for a Prometheus to check."""
    panels = json.loads((INFRA / "dashboards" / f"{uid}.json").read_text())["panels"]
    written = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$job", ".+").replace("$__rate_interval", "1m") for query in written]


def counted() -> set[str]:
    metrics = Metrics()
    metrics.request_ended("/v1/completions", 200, 0.1)
    metrics.start_ended("cold", "ok", 1.0)
    return metrics_in(metrics.render({"state": "ready"}).decode())


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_panels_have_ids_places_and_the_chosen_jobs_of_their_own(uid):
    found = json.loads((INFRA / "dashboards" / f"{uid}.json").read_text())
    assert found["uid"] == uid
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    for panel in found["panels"]:
        for target in panel["targets"]:
            assert panel["datasource"] == target["datasource"] == {"type": "prometheus", "uid": "${source}"}
            assert 'job=~"$job"' in target["expr"]


def test_every_metric_in_alerts_and_dashboards_is_counted_somewhere():
    known = counted() | STATISTICS | POOL_METRICS
    used = metrics_in(" ".join([*expressions(), *queries("teneral"), *queries("pool")]))
    assert used <= known, used - known


def test_each_alert_has_a_test_and_says_what_to_do():
    tested = RULES.with_name("teneral.rules.test.yml").read_text()
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert f'alertname="{rule["alert"]}"' in tested
        assert rule["annotations"]["action"]


@needs_promtool
def test_promtool_takes_the_rules_and_their_tests_pass(tmp_path):
    for arguments in (
        ["check", "rules", RULES],
        ["test", "rules", RULES.with_name("teneral.rules.test.yml")],
    ):
        result = subprocess.run(
            [PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, cwd=RULES.parent
        )
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.parametrize("expression", ["vector(0) > 1", ALWAYS], ids=["never", "always"])
def test_a_rule_that_never_or_always_fires_fails_its_test(tmp_path, alert, expression):
    rules = yaml.safe_load(RULES.read_text())
    (rule,) = [each for each in rules["groups"][0]["rules"] if each["alert"] == alert]
    rule["expr"] = expression
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules))
    test = tmp_path / "test.yml"
    test.write_text(RULES.with_name("teneral.rules.test.yml").read_text())
    result = subprocess.run([PROMTOOL, "test", "rules", test], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert alert in result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("uid", DASHBOARDS)
def test_promtool_parses_every_panel(uid, tmp_path):
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries(uid))]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
