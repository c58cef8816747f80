"""The metrics, and their text for Prometheus."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from typing import Any

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from tests.support.load import patience_s

from teneral import __version__
from teneral.runtime.engine.options import EngineStatistics
from teneral.runtime.metrics import Histogram, Metrics, numbers_in


class Inner(Struct, frozen=True):
    used: int
    label: str
    ended_total: dict[str, int]


def samples(metrics: Metrics, statistics: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Values by the sample's name and its labels' values."""
    families = text_string_to_metric_families(metrics.render(statistics).decode())
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 12.0


def test_numbers_are_found_at_any_depth_and_nothing_else_is() -> None:
    nested = {"a": 1, "b": {"c": 2.5, "d": "text", "e": None, "f": [1]}, "g": Inner(3, "x", {"stop": 4})}
    assert dict(numbers_in(nested)) == {
        ("a",): 1.0,
        ("b", "c"): 2.5,
        ("g", "used"): 3.0,
        ("g", "ended_total", "stop"): 4.0,
    }


def test_statistics_become_gauges_and_totals_counters() -> None:
    found = samples(
        Metrics(), {"state": "ready", "pool": Inner(3, "x", {"stop": 4, "length": 5}), "steps_total": 6}
    )
    assert found["teneral_pool_used", ""] == 3
    assert found["teneral_pool_ended_total", "stop"] == 4
    assert found["teneral_pool_ended_total", "length"] == 5
    assert found["teneral_steps_total", ""] == 6
    assert found["teneral_state", "ready"] == 1


def test_what_the_engine_counts_of_proposals_has_names_of_its_own_and_only_those() -> None:
    counts = {
        "drafted_tokens_total": 7,
        "accepted_proposals_total": 5,
        "rejected_proposals_total": 2,
        "accepted_look_ahead_total": 9,
        "rejected_look_ahead_total": 3,
    }
    others = dict.fromkeys(EngineStatistics.__struct_fields__, 0)
    found = samples(Metrics(), {"engine": EngineStatistics(**{**others, "ended_total": {}, **counts})})
    assert found["teneral_drafted_tokens_total", ""] == 7
    assert found["teneral_proposals_total", "accepted"] == 5
    assert found["teneral_proposals_total", "rejected"] == 2
    assert found["teneral_look_ahead_tokens_total", "accepted"] == 9
    assert found["teneral_look_ahead_tokens_total", "rejected"] == 3
    assert not any(f"teneral_engine_{name}" == sample for name in counts for sample, _ in found)


async def test_a_sequence_is_counted_at_its_end_with_its_queue_and_its_tokens(start: Any) -> None:
    async with start() as server:
        for _ in range(2):
            body = {"prompt": "a b c", "max_tokens": 5, "ignore_eos": True, "n": 2}
            usage = (await server.post("/v1/completions", body)).json["usage"]
        found = samples(server.service.metrics, {})
        assert (await server.get("/version")).json == {"version": __version__}
    for name in (
        "queue_seconds",
        "generation_seconds",
        "sequence_prompt_tokens",
        "sequence_generated_tokens",
    ):
        assert found[f"teneral_{name}_count", ""] == 4
    assert found["teneral_sequence_prompt_tokens_sum", ""] == 4 * usage["prompt_tokens"]
    assert found["teneral_sequence_generated_tokens_sum", ""] == 4 * 5
    assert found["teneral_sequence_generated_tokens_bucket", "16.0"] == 4
    assert found["teneral_generation_seconds_sum", ""] > 0


def test_the_versions_and_the_process_are_among_the_metrics() -> None:
    found = samples(Metrics(), {})
    assert {labels for name, labels in found if name == "teneral_build_info"} == {
        f"{platform.python_version()},{__version__}"
    }
    assert found["process_resident_memory_bytes", ""] > 1 << 20
    assert found["process_cpu_seconds_total", ""] > 0


def test_tokens_of_one_step_share_its_time() -> None:
    metrics = Metrics()
    metrics.tokens_generated(1, None)
    metrics.tokens_generated(4, 0.2)
    found = samples(metrics, {})
    assert found["teneral_generated_tokens_total", ""] == 5
    assert found["teneral_inter_token_seconds_count", ""] == 4
    assert found["teneral_inter_token_seconds_sum", ""] == 0.2
    assert found["teneral_inter_token_seconds_bucket", "0.05"] == 4


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(1000):
            metrics.request_ended("/route", 200, 0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics, {})["teneral_requests_total", "/route,200"] == 4000


def test_counting_does_not_import_the_prometheus_client() -> None:
    program = """
import sys
from teneral.handlers.app import create_app
from teneral.runtime.metrics import Metrics
Metrics().request_ended('/', 200, 0.1)
print([name for name in ('prometheus_client', 'torch', 'jinja2', 'tokenizers') if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(60)
    )
    assert result.stdout.strip() == "[]", result.stderr
