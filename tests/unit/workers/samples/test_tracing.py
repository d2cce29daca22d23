"""Spans of samples, with OpenTelemetry's own exporter in memory. Its libraries are an extra."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.execution_bench import REFUSED, RESET, TRACE, Bench
from workers import worker

if TYPE_CHECKING:
    from workers.samples.tracing import Tracing

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")


def traced(bench: Bench) -> Any:
    """The exporter that gets the spans of what the bench executes."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from workers.samples.tracing import Tracing

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing: Tracing = Tracing(provider)
    bench.executor._forwarder = tracing.forwarder(bench.executor._forwarder)
    bench.executor = tracing.executor(bench.executor)  # type: ignore[assignment] # `execute` is all that is asked of it
    return exporter


async def test_a_sample_is_a_child_of_the_clients_span_and_its_requests_of_the_sample() -> None:
    bench = Bench(RESET, None)
    exporter = traced(bench)
    await bench.execute(trace=TRACE)
    first, second, sample = exporter.get_finished_spans()
    assert f"{sample.context.trace_id:032x}" == TRACE.split("-")[1]
    assert f"{sample.parent.span_id:016x}" == TRACE.split("-")[2]
    assert [span.parent.span_id for span in (first, second)] == [sample.context.span_id] * 2
    assert sample.attributes["gateway.request_id"] == bench.sample.request_id
    assert sample.attributes["gateway.outcome"] == "ready"
    assert first.attributes["error.type"] == "interrupted"
    span_ids = [headers["traceparent"].split("-")[2] for headers in bench.forwarder.headers]
    assert span_ids == [f"{span.context.span_id:016x}" for span in (first, second)]


async def test_without_a_clients_span_a_sample_begins_a_trace() -> None:
    bench = Bench()
    exporter = traced(bench)
    await bench.execute()
    assert exporter.get_finished_spans()[-1].parent is None


async def test_a_sample_that_fails_is_an_error() -> None:
    bench = Bench(REFUSED, upstream_wait_s=0.0)
    exporter = traced(bench)
    await bench.execute()
    sample = exporter.get_finished_spans()[-1]
    assert sample.status.status_code.name == "ERROR"
    assert sample.attributes["gateway.outcome"] in ("failed", "orphaned")


async def test_no_span_holds_a_prompt() -> None:
    bench = Bench(RESET, None)
    exporter = traced(bench)
    await bench.execute()
    names = {name for span in exporter.get_finished_spans() for name in span.attributes}
    assert names == {
        "gateway.request_id",
        "gateway.outcome",
        "gateway.prompt_bytes",
        "gateway.upstream_request_id",
        "gen_ai.request.model",
        "gen_ai.request.choice.count",
        "server.address",
        "error.type",
    }


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    program = f"import sys, {worker.__name__}; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
