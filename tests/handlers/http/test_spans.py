"""OpenTelemetry spans, as a real OTLP/HTTP collector receives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.support.load import patience_s

from teneral.handlers.http import spans
from teneral.handlers.http.spans import SpanExport, TraceParent

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PATH = "/v1/completions"


class Collector:
    """Keeps what is exported; `status` is its answer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[Any] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if collector.status == 200:
                    request = ExportTraceServiceRequest.FromString(data)
                    for resource in request.resource_spans:
                        collector.resources.append(resource.resource)
                        for scope in resource.scope_spans:
                            collector.spans.extend(scope.spans)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    port = collector.server.server_address[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setattr(spans, "CLOSE_S", patience_s(30))
    close = SpanExport.close
    monkeypatch.setattr(SpanExport, "close", lambda export: close(export, patience_s(30)))
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in span.attributes
    }


def header(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}


async def test_a_request_is_a_tree_under_its_callers_span(start: Any, collector: Collector) -> None:
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    async with start(otel=True) as server:
        await server.post(PATH, body, headers={**header(), "x-request-id": "mine"})
    server_span = collector.named(f"POST {PATH}")
    assert server_span.trace_id.hex() == TRACE
    assert server_span.parent_span_id.hex() == CALLER
    assert server_span.kind == Span.SPAN_KIND_SERVER
    found = attributes(server_span)
    assert (found["http.response.status_code"], found["teneral.request_id"]) == (200, "mine")
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (1, 3)
    queue, prefill, decode = map(collector.named, ("queue", "prefill", "decode"))
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {server_span.span_id}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert server_span.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= server_span.end_time_unix_nano
    assert abs(server_span.end_time_unix_nano - time.time_ns()) < patience_s(60) * 1e9
    assert len(collector.spans) == 4
    (resource,) = collector.resources
    assert {each.key: each.value.string_value for each in resource.attributes}["service.name"] == "teneral"


async def test_requests_that_their_caller_does_not_sample_are_left_out(
    start: Any, collector: Collector
) -> None:
    async with start(otel=True) as server:
        await server.post(PATH, {"prompt": "x", "max_tokens": 1}, headers=header("00"))
        await server.post(PATH, {"prompt": 5.5})
        await server.get("/livez")
    (span,) = collector.spans
    assert not span.parent_span_id, "a trace of its own"
    assert attributes(span)["http.response.status_code"] == 400


async def test_a_request_during_a_load_has_the_loads_spans(start: Any, collector: Collector) -> None:
    async with start(otel=True, loaded=False) as server:
        timeline = server.instance.timeline
        post = server.post(PATH, {"prompt": "x", "max_tokens": 1}, headers=header())
        request = asyncio.ensure_future(post)
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        with timeline.span("fetch", "layers.7", bytes=5):
            time.sleep(0.002)
        server.instance.let_in()
        assert (await request).status == 200
        with timeline.span("fetch", "layers.8"):
            pass
    load = collector.named("load")
    fetch = collector.named("layers.7 fetch")
    assert load.parent_span_id == collector.named(f"POST {PATH}").span_id
    assert fetch.parent_span_id == load.span_id
    assert attributes(fetch)["bytes"] == 5
    assert (
        load.start_time_unix_nano <= fetch.start_time_unix_nano + 1e7
    )  # the clocks' common origin is kept to 10 ms
    assert fetch.end_time_unix_nano <= load.end_time_unix_nano
    assert not [span for span in collector.spans if span.name == "layers.8 fetch"], "after its first token"


async def test_a_collector_that_fails_does_not_touch_requests(
    start: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 400
    monkeypatch.setattr(spans, "MAX_PENDING", 2)
    async with start(otel=True) as server:
        for _ in range(20):
            answer = await server.post(PATH, {"prompt": "x", "max_tokens": 1}, headers=header())
            assert answer.status == 200
    assert collector.spans == []


def test_unsampled_requests_need_no_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    export = SpanExport({})
    assert export.wants(None)
    assert export.wants(TraceParent(TRACE, CALLER, is_sampled=True))
    assert not export.wants(TraceParent(TRACE, CALLER, is_sampled=False))
    assert SpanExport({"OTEL_TRACES_SAMPLER": "always_on"}).wants(
        TraceParent(TRACE, CALLER, is_sampled=False)
    )
    export.close()
