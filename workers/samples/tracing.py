"""OpenTelemetry spans: one for each sample, and one for each request that it sends upstream.

This module is imported only with --otel-endpoint: its libraries are those of the extra `otel`, and a sample without
spans costs nothing. A sample's span is a child of the client's, whose `traceparent` came with the submission; the
upstream gets the traceparent of the request's span. Attributes name and count; they never hold a prompt, a token or a
key.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.core.faults import Fault
from shared.core.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yarl import URL

    from shared.wire.json_arrays import Body
    from workers.samples.live import Ending, Executes, LiveSample
    from workers.upstream.client.port import Exchange
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.upstream import Upstream

_NAME: Final = "tinker-sampling-gateway"
_CONTEXT: Final = TraceContextTextMapPropagator()
# Spans that are not sent by then are lost, so that a collector that is down does not delay the worker's end.
_FLUSH_S: Final = 3.0
_BAD: Final = (State.FAILED, State.ORPHANED)


class Tracing:
    """Make the spans of one worker. Which samples get one is OpenTelemetry's own setting: OTEL_TRACES_SAMPLER."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_NAME)

    def executor(self, inner: Executes) -> Executes:
        return _TracedExecutor(inner, self)

    def forwarder(self, inner: Forwarder) -> Forwarder:
        # It passes on every method that it does not trace.
        return cast("Forwarder", _TracedForwarder(inner, self))

    @contextmanager
    def span(self, name: str, kind: SpanKind, parent: str | None, attributes: Mapping[str, Any]) -> Iterator[Any]:
        """Open a span below `parent`, a traceparent from outside, or else below the current span of this task."""
        context = _CONTEXT.extract({"traceparent": parent}) if parent is not None else None
        with self._tracer.start_as_current_span(name, context, kind, dict(attributes)) as span:
            yield span

    def traceparent(self) -> str | None:
        """Return the traceparent of the current span of this task."""
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier)
        return carrier.get("traceparent")

    async def close(self) -> None:
        await asyncio.to_thread(self._provider.force_flush, int(_FLUSH_S * 1000))
        await asyncio.to_thread(self._provider.shutdown)


class _TracedExecutor:
    def __init__(self, inner: Executes, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing

    async def execute(self, sample: LiveSample) -> Ending:
        attributes = {
            "gateway.request_id": sample.request_id,
            "gen_ai.request.model": sample.target.upstream_name,
            "gen_ai.request.choice.count": sample.spec.num_samples,
            "gateway.prompt_bytes": len(sample.spec.prompt),
        }
        with self._tracing.span("sample", SpanKind.SERVER, sample.trace, attributes) as span:
            sample.trace = self._tracing.traceparent()
            try:
                ending = await self._inner.execute(sample)
            except asyncio.CancelledError:
                stop = sample.stop
                span.set_attribute("gateway.outcome", stop.state.name.lower() if stop is not None else "given_up")
                raise
            span.set_attribute("gateway.outcome", ending.state.name.lower())
            if ending.state in _BAD:
                span.set_status(StatusCode.ERROR)
            return ending


class _TracedForwarder:
    def __init__(self, inner: Forwarder, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing

    async def post(
        self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str], exchange: Exchange | None = None
    ) -> Body | Fault:
        attributes = {"server.address": upstream.url, "gateway.upstream_request_id": headers.get("X-Request-Id", "")}
        with self._tracing.span("upstream request", SpanKind.CLIENT, None, attributes) as span:
            if (traceparent := self._tracing.traceparent()) is not None:
                headers = {**headers, "traceparent": traceparent}
            reply = await self._inner.post(upstream, url, body, headers, exchange)
            if isinstance(reply, Fault):
                span.set_attribute("error.type", reply.kind.value)
                span.set_status(StatusCode.ERROR)
            return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def open_tracing(endpoint: str, slot: int) -> Tracing:
    """Make spans that go to the collector at `endpoint`, by OTLP over HTTP."""
    provider = TracerProvider(resource=Resource.create({"service.name": _NAME, "gateway.slot": slot}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")))
    return Tracing(provider)
