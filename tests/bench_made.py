"""Bench reports without a run: from counts and looks that a test makes up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gateway.bench.load import messages
from gateway.bench.report.outcome import Run, RunFacts, build_report, build_run
from gateway.bench.scenario import Scenario
from gateway.bench.watch.procfs import ProcessUsage
from gateway.bench.watch.watch import Observations

if TYPE_CHECKING:
    from gateway.bench.report.report import Report


def client(**values: Any) -> messages.ClientReport:
    fields: dict[str, Any] = {field.name: 0 for field in msgspec.structs.fields(messages.ClientReport)}
    fields |= {
        "failures": {},
        "examples": [],
        "submit_s": b"",
        "latency_s": b"",
        "spans_s": b"",
        "promises_s": b"",
        "cpu_seconds": 0.0,
    }
    return messages.ClientReport(**(fields | values))


def facts_of(*clients: messages.ClientReport, samples: int = 10, seconds: float = 2.0, **values: Any) -> RunFacts:
    """`values`: of the scenario."""
    scenario = Scenario(samples=samples, **values)
    return RunFacts(scenario, clients, seconds, session_poll=False, verified=True, model="m")


def made(
    *clients: messages.ClientReport, samples: int = 10, seen: Observations | None = None, seconds: float = 2.0
) -> Report:
    return build_report(facts_of(*clients, samples=samples, seconds=seconds), seen or Observations())


def measured_run(concurrency: int = 10, samples: int = 10, **counts: Any) -> Run:
    """A run of 2 s with a result every 0.1 s and a worker that took 10 ms of CPU for each sample."""
    ends = np.arange(1, samples + 1) * 2.0 / samples
    load = client(
        completed=samples - counts.get("failed", 0),
        latency_s=ends.astype("<f4").tobytes(),
        submit_s=(ends / 100).astype("<f4").tobytes(),
        spans_s=np.column_stack((np.zeros(samples), ends)).astype("<f8").tobytes(),
        **counts,
    )
    seen = Observations(first_stats=stats(0), last_stats=stats(samples))
    for at_s in (0.0, 1.0, 2.0):
        seen.workers.look({1: ProcessUsage(1.0 + 0.005 * samples * at_s, 50 * 2**20, 3)}, at_s)
        seen.redis.look({2: ProcessUsage(1.0 + 0.001 * samples * at_s, 50 * 2**20, 3)}, at_s)
        seen.healthz_at_s.append(at_s)
        seen.healthz_ms.append(2.0 + at_s)
    return build_run(facts_of(load, samples=samples, concurrency=concurrency), seen)


def stats(executions: int, **values: Any) -> dict[str, Any]:
    return {
        "executions": executions,
        "peak_in_flight": 9,
        "aborted": 0,
        "by_source_ip": {},
        "by_request_id": 0,
    } | values
