"""/livez, /readyz, /metrics, /timeline and /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.support.inspection import set_failure

from teneral.handlers.http.model_slot import STANDBY_MARK
from teneral.loader.errors import AccessDeniedError


async def test_readiness_follows_the_load(start: Any) -> None:
    async with start(loaded=False) as server:
        instance = server.instance
        instance.fraction = 0.25
        loading = await server.get("/readyz")
        assert (loading.status, loading.json["state"]) == (503, "loading")
        assert loading.json["progress"]["fraction"] == 0.25
        assert int(loading.headers["Retry-After"]) >= 1

        instance.let_in()
        instance.fraction = 0.9
        partial = await server.get("/readyz")
        assert (partial.status, partial.json["state"]) == (200, "partial")

        instance.fraction = 1.0
        ready = await server.get("/readyz")
        assert (ready.status, ready.json["state"]) == (200, "ready")
        assert "Retry-After" not in ready.headers


async def test_health_is_readiness_under_the_name_that_routers_know(start: Any) -> None:
    async with start(loaded=False) as server:
        assert (await server.get("/health")).status == 503
        server.instance.let_in()
        assert (await server.get("/health")).json == (await server.get("/readyz")).json


async def test_exact_readiness_waits_for_the_last_weight(start: Any) -> None:
    async with start() as server:
        server.instance.fraction = 0.9
        assert (await server.get("/readyz")).status == 200
        partial = await server.get("/readyz?when=exact")
        assert (partial.status, partial.json["state"]) == (503, "partial")
        server.instance.fraction = 1.0
        assert (await server.get("/health?when=exact")).status == 200
        assert (await server.get("/readyz?when=soon")).status == 400


async def test_readiness_can_be_waited_for(start: Any) -> None:
    async with start(loaded=False) as server:
        waiting = asyncio.create_task(server.get("/readyz?wait_s=60"))
        assert (await server.get("/readyz?wait_s=0.05")).status == 503
        assert not waiting.done()
        server.instance.let_in()
        assert (await waiting).status == 200
        for text in ("-1", "61", "nan", "soon"):
            assert (await server.get(f"/readyz?wait_s={text}")).status == 400


async def test_readiness_is_not_waited_for_where_it_cannot_come(start: Any) -> None:
    async with start(loaded=False) as server:
        set_failure(server.instance, AccessDeniedError("no credentials for s3://bucket"))
        assert (await server.get("/readyz?wait_s=60")).status == 503


async def test_starts_are_counted_by_kind_and_outcome(start: Any) -> None:
    async with start(loaded=False) as server:
        cold = asyncio.create_task(server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.instance.let_in()
        assert (await cold).status == 200
        await server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1})
        text = (await server.get("/metrics")).body.decode()
        assert 'teneral_starts_total{kind="cold",outcome="ok"} 1.0' in text
        assert 'teneral_start_seconds_count{kind="cold"} 1.0' in text
        assert "teneral_cold_requests_total 1.0" in text


async def test_a_start_that_fails_is_counted_as_failed(start: Any) -> None:
    async with start(loaded=False) as server:
        server.instance.timeline.mark("process", STANDBY_MARK)
        server.instance.fail(AccessDeniedError("no credentials for s3://bucket"))
        server.instance.close()
        text = server.service.metrics.render({}).decode()
        assert 'teneral_starts_total{kind="standby",outcome="failed"} 1.0' in text
        assert "teneral_start_seconds_count" not in text


async def test_a_failed_instance_is_alive_but_not_ready_and_says_why(start: Any) -> None:
    async with start(loaded=False) as server:
        # Without the server's own reaction, which is to end.
        set_failure(server.instance, AccessDeniedError("no credentials for s3://bucket"))
        ready = await server.get("/readyz")
        assert (ready.status, ready.json["state"]) == (503, "failed")
        assert ready.json["error"] == "no credentials for s3://bucket"
        assert (await server.get("/livez")).status == 200


async def test_metrics_are_prometheus_text_with_what_happened(start: Any) -> None:
    async with start() as server:
        await server.post("/v1/completions", {"prompt": "Once", "n": 2, "max_tokens": 5, "ignore_eos": True})
        await server.get("/v1/some/strange/path")
        answer = await server.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}

        def value(family: str, sample: str, **labels: str) -> float:
            return next(s.value for s in families[family].samples if s.name == sample and s.labels == labels)

        requests = ("teneral_requests", "teneral_requests_total")
        assert value(*requests, route="/v1/completions", status="200") == 1
        assert value(*requests, route="unmatched", status="404") == 1
        assert value("teneral_prompt_tokens", "teneral_prompt_tokens_total") == 4
        assert value("teneral_generated_tokens", "teneral_generated_tokens_total") == 10
        assert value("teneral_first_token_seconds", "teneral_first_token_seconds_count") == 2
        assert value("teneral_inter_token_seconds", "teneral_inter_token_seconds_count") == 8
        assert value("teneral_state", "teneral_state", state="ready") == 1
        assert value("teneral_state", "teneral_state", state="loading") == 0
        assert value("teneral_engine_running", "teneral_engine_running") == 0
        assert value("teneral_engine_free_blocks", "teneral_engine_free_blocks") > 0
        assert value("teneral_progress_fraction", "teneral_progress_fraction") == 1
        assert value("teneral_http_in_flight", "teneral_http_in_flight") == 0


async def test_the_timeline_is_json_with_spans(start: Any) -> None:
    async with start() as server:
        server.instance.timeline.mark("process", "port open")
        snapshot = (await server.get("/timeline")).json
        assert snapshot["schema"] == 1
        assert "port open" in [span["name"] for span in snapshot["spans"]]


async def test_there_is_one_model_with_slashes_in_its_name_and_all(start: Any) -> None:
    async with start() as server:
        listed = (await server.get("/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["tiny/model"]
        found = await server.get("/v1/models/tiny/model")
        assert found.json == listed["data"][0]
        missing = await server.get("/v1/models/other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
