"""OpenTelemetry spans of requests, exported over OTLP/HTTP.

A request costs one append to a bounded queue; a thread imports OpenTelemetry at the first one, makes the spans with the
times that were measured anyway, and exports them. Requests that their caller does not sample cost nothing. The
exporter, its address and its sampler follow OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and so on).

    POST /v1/completions        the server's span; its parent is the caller's, from `traceparent`
      queue, prefill, decode    until the engine's first step, the first token, the last
      load                      for a request that came while the model loaded
        layers.7 fetch          spans of the timeline until the first token
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from ...loader.timeline import Span, Timeline

MAX_PENDING = 1024  # requests whose spans are not made yet
MAX_LOAD_SPANS = 1000  # of one request; the longest ones are kept
LOAD_LANES = frozenset({"manifest", "fetch", "verify", "decode", "place", "tokenizer", "model", "execute"})
CLOSE_S = 2.0  # for the last export
SAMPLED = 1

logger = logging.getLogger("teneral.http")


class TraceParent(NamedTuple):
    """The caller's position in its trace, from the header `traceparent` of W3C Trace Context."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    is_sampled: bool


class RequestTimes(NamedTuple):
    """One ended request. Times are `time.monotonic()`'s; None where it did not come so far."""

    method: str
    route: str  # a pattern, never a client's text
    status: int
    request_id: str
    model: str
    parent: TraceParent | None
    arrived_s: float
    ended_s: float
    first_step_s: float | None
    first_token_s: float | None
    prompt_tokens: int
    generated_tokens: int
    load: Timeline | None  # of the load that the request waited for


class SpanExport:
    """The queue of ended requests and the thread that exports them. Thread-safe."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Raises `UsageError` where OpenTelemetry is not installed."""
        environment = os.environ if environment is None else environment
        from importlib.util import find_spec

        if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
            raise UsageError("--otel needs OpenTelemetry", key="otel", hint="pip install 'teneral[otel]'")
        # The default sampler follows the caller; another one is asked for each request.
        self._follows_caller = environment.get("OTEL_TRACES_SAMPLER", "parentbased").startswith("parentbased")
        self._pending: deque[RequestTimes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_dropped = 0

    def wants(self, parent: TraceParent | None) -> bool:
        """False for a request that its caller does not sample."""
        return parent is None or parent.is_sampled or not self._follows_caller

    def add(self, request: RequestTimes) -> None:
        """Export the request's spans soon. Does not block; drops the request where too many wait."""
        with self._changed:
            if self._is_closed:
                return
            if len(self._pending) >= MAX_PENDING:
                self._num_dropped += 1
                if self._num_dropped == 1:
                    logger.warning("more than %d requests wait for the export of their spans", MAX_PENDING)
                return
            self._pending.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="teneral-spans", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export the rest. Blocks for `timeout_s` at most; what is left then is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        provider = None
        try:
            provider = _provider()
            while (request := self._next()) is not None:
                _export(provider, request)
        except Exception:
            logger.exception("spans are not exported any more")
            with self._changed:
                self._is_closed = True
                self._pending.clear()
        finally:
            if provider is not None:
                provider.shutdown()

    def _next(self) -> RequestTimes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            return self._pending.popleft() if self._pending else None


def _provider() -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ... import __version__

    attributes = {"service.name": "teneral", "service.version": __version__}
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = name
    # `close` ends the process's part in it; the library's own exit handler would wait for its exports as well.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _export(provider: TracerProvider, request: RequestTimes) -> None:
    from opentelemetry import trace

    tracer = provider.get_tracer("teneral")
    since_epoch_s = time.time() - time.monotonic()

    def nanoseconds(seconds: float) -> int:
        return int((seconds + since_epoch_s) * 1e9)

    def child(parent: Any, name: str, start_s: float, end_s: float, attributes: Mapping[str, Any]) -> Any:
        context = trace.set_span_in_context(parent)
        span = tracer.start_span(
            name, context=context, start_time=nanoseconds(start_s), attributes=dict(attributes)
        )
        span.end(nanoseconds(max(start_s, end_s)))
        return span

    context = None
    if request.parent is not None:
        flags = trace.TraceFlags(SAMPLED if request.parent.is_sampled else 0)
        caller = trace.SpanContext(
            int(request.parent.trace_id, 16),
            int(request.parent.span_id, 16),
            is_remote=True,
            trace_flags=flags,
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(caller))
    server = tracer.start_span(
        f"{request.method} {request.route}",
        context=context,
        kind=trace.SpanKind.SERVER,
        start_time=nanoseconds(request.arrived_s),
        attributes=_attributes(request),
    )
    if server.is_recording():
        for name, start_s, end_s in _phases(request):
            child(server, name, start_s, end_s, {})
        if request.load is not None:
            until_s = request.ended_s if request.first_token_s is None else request.first_token_s
            load = child(server, "load", request.arrived_s, until_s, {})
            zero_s = request.load.started_at
            for span in _load_spans(request.load.spans(), request.arrived_s - zero_s, until_s - zero_s):
                child(
                    load,
                    f"{span.name} {span.lane}",
                    span.start_s + zero_s,
                    span.end_s + zero_s,
                    span.attributes,
                )
        if request.status >= 500:
            server.set_status(trace.StatusCode.ERROR)
    server.end(nanoseconds(request.ended_s))


def _phases(request: RequestTimes) -> Iterable[tuple[str, float, float]]:
    step_s, token_s = request.first_step_s, request.first_token_s
    if step_s is not None:
        yield "queue", request.arrived_s, step_s
        if token_s is not None:
            yield "prefill", step_s, token_s
            yield "decode", token_s, request.ended_s


def _attributes(request: RequestTimes) -> dict[str, str | int]:
    """Names of OpenTelemetry's semantic conventions for HTTP and for generative models."""
    attributes: dict[str, str | int] = {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": request.status,
        "teneral.request_id": request.request_id,
    }
    if request.generated_tokens:
        attributes["gen_ai.request.model"] = request.model
        attributes["gen_ai.usage.input_tokens"] = request.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = request.generated_tokens
    return attributes


def _load_spans(spans: list[Span], from_s: float, until_s: float) -> list[Span]:
    """Spans of the load that overlap this time, in the order of their starts."""
    found = [
        span
        for span in spans
        if span.lane in LOAD_LANES
        and span.end_s > span.start_s
        and span.end_s > from_s
        and span.start_s < until_s
    ]
    if len(found) > MAX_LOAD_SPANS:
        found = sorted(found, key=lambda span: span.start_s - span.end_s)[:MAX_LOAD_SPANS]
    return sorted(found, key=lambda span: span.start_s)
