"""Build the report from what the clients and the watch measured. Pure."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from gateway.bench.report import report
from gateway.bench.report.report import ChaosEvent, Client, Gateway, Redis, Report, SimulatorReport, Tail, Wire, Wires
from gateway.bench.report.series import Series
from gateway.bench.watch import procfs
from gateway.bench.watch.chaos import recovered_after_s
from gateway.bench.watch.usage import RunUsage, warnings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from gateway.bench.load import messages
    from gateway.bench.scenario import Scenario
    from gateway.bench.watch.chaos import Break
    from gateway.bench.watch.watch import Observations

_REPORTED_PACKAGES: Final = (
    "tinker-sampling-gateway",
    "uvicorn",
    "uvloop",
    "httptools",
    "starlette",
    "aiohttp",
    "redis",
    "hiredis",
    "orjson",
    "pysimdjson",
    "protobuf",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that the driver knows.

    `seconds` counts from the first submission, at the monotonic time `started_s`, to the last result. `breaks` lists
    what was broken meanwhile. `kept_in`: None uses what /status says about Redis. `session_poll`: None uses the
    gateway's counters. `sdk_version` is set if the client is the published SDK.
    """

    scenario: Scenario
    clients: Sequence[messages.ClientReport]
    seconds: float
    session_poll: bool | None
    verified: bool
    model: str
    kept_in: str | None = None
    started_s: float = 0.0
    breaks: Sequence[Break] = ()
    sdk_version: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its report, and the measurements behind the plots."""

    report: Report
    series: Series


def build_run(facts: RunFacts, seen: Observations) -> Run:
    return Run(build_report(facts, seen), build_series(facts, seen))


def build_series(facts: RunFacts, seen: Observations) -> Series:
    answered = [(at_s, took_ms / 1e3) for at_s, took_ms in zip(seen.healthz_at_s, seen.healthz_ms, strict=True)]
    health_s = np.array(sorted(answered + seen.healthz_unanswered_s), float).reshape(-1, 2) - (facts.started_s, 0.0)
    return Series(
        seconds=facts.seconds,
        latency_s=report.merge_latencies(client.latency_s for client in facts.clients).astype(np.float64),
        submit_s=report.merge_latencies(client.submit_s for client in facts.clients).astype(np.float64),
        spans_s=_pairs(client.spans_s for client in facts.clients) - facts.started_s,
        health_s=health_s,
        cpu_s={
            whose: np.asarray(ledger.spent) - (facts.started_s, 0.0)
            for whose, ledger in (
                ("gateway workers", seen.workers),
                ("Redis", seen.redis),
                ("load clients", seen.clients),
                ("simulated vLLM", seen.simulators),
            )
            if ledger.cpu_seconds is not None
        },
    )


def build_report(facts: RunFacts, seen: Observations) -> Report:
    samples = report.merge_samples(facts.clients, facts.scenario.samples, verified=facts.verified)
    reexecutions = _grown(seen.first_status, seen.last_status, "samples", "reexecutions")
    unreported = sum(done.in_flight for done in facts.breaks)
    allowed = report.allowed_executions(samples.requested, samples.resubmitted, reexecutions, unreported)
    return Report(
        samples=samples,
        failures=report.merge_failures(facts.clients),
        examples=[example for client in facts.clients for example in client.examples][:5],
        seconds=facts.seconds,
        samples_per_second=report.rate(samples.completed, facts.seconds),
        submit_latency_s=report.quantiles(report.merge_latencies(client.submit_s for client in facts.clients)),
        latency_s=report.quantiles(report.merge_latencies(client.latency_s for client in facts.clients)),
        gateway=_gateway(seen, samples.completed, reexecutions),
        redis=_redis(seen, samples.completed, facts.kept_in),
        simulator=_simulator(seen, allowed),
        client=_client(facts, seen),
        wires=Wires(client=report.merge_wire(facts.clients), upstream=_upstream_wire(seen), redis=_redis_wire(seen)),
        chaos=chaos_events(facts),
        warnings=warnings_of(_usage(seen)),
        machine=procfs.machine(),
        versions=_versions(seen.last_status, facts.sdk_version),
        config={**msgspec.structs.asdict(facts.scenario), "model": facts.model},
    )


def _usage(seen: Observations) -> RunUsage:
    ours = (seen.workers, seen.redis, seen.clients, seen.simulators, seen.aside)
    first, last = seen.first_listen_overflows, seen.last_listen_overflows
    overflows = last - first if first is not None and last is not None else 0
    return RunUsage(seen.clients, seen.simulators, ours, seen.machine, overflows)


def _gateway(seen: Observations, completed: int, reexecutions: int | None) -> Gateway:
    lag_ms = seen.loop_lag_ms_p99
    figures = Gateway(
        healthz_ms=report.tail(seen.healthz_ms),
        healthz_failures=seen.healthz_failures,
        loop_lag_ms=Tail(p99=max(lag_ms), max=max([*lag_ms, seen.loop_lag_ms_max or 0.0])) if lag_ms else None,
        reexecutions=reexecutions,
    )
    cpu_seconds = seen.workers.cpu_seconds
    if cpu_seconds is not None:
        figures.cpu_seconds = cpu_seconds
        figures.cpu_ms_per_sample = report.per(cpu_seconds * 1e3, completed)
        figures.peak_rss_bytes = seen.workers.peak_rss_bytes
        figures.peak_rss_bytes_per_worker = seen.workers.peak_rss_bytes_per_process
        figures.peak_fds = seen.workers.peak_fds
        figures.workers = seen.workers.processes
    return figures


def _client(facts: RunFacts, seen: Observations) -> Client:
    merged = report.merge_client(facts.clients, session_poll=facts.session_poll)
    if merged.polls is None:
        merged.polls = _grown(seen.first_status, seen.last_status, "counters", "polls")
        merged.session_polls = _grown(seen.first_status, seen.last_status, "counters", "session_polls")
    if merged.session_poll is None and merged.session_polls is not None:
        merged.session_poll = merged.session_polls > 0
    return merged


def _upstream_wire(seen: Observations) -> Wire | None:
    """Return the simulator's byte counts; None also if a simulator was killed, since its last counts are lost."""
    first, last = seen.first_stats, seen.last_stats
    if first is None or last is None or seen.ended_stats or "sent_bytes" not in first:
        return None
    received, sent = (last[name] - first[name] for name in ("received_bytes", "sent_bytes"))
    return Wire(received_bytes=sent, sent_bytes=received)


def _redis_wire(seen: Observations) -> Wire | None:
    """Return Redis's byte counts; None also if a restarted server began to count from zero."""
    received, sent = (
        _grown(seen.first_status, seen.last_status, "redis", name) for name in ("received_bytes", "sent_bytes")
    )
    if received is None or sent is None or received < 0 or sent < 0:
        return None
    return Wire(received_bytes=sent, sent_bytes=received)


def _redis(seen: Observations, completed: int, kept_in: str | None) -> Redis:
    return Redis(
        cpu_seconds=seen.redis.cpu_seconds,
        peak_bytes=seen.redis_peak_bytes,
        commands_per_sample=report.per(
            _grown(seen.first_status, seen.last_status, "counters", "store_commands"), completed
        ),
        description=_describe(seen.last_status, kept_in),
    )


def _describe(status: Mapping[str, Any] | None, kept_in: str | None) -> str | None:
    """Describe where results are kept, for a person."""
    redis = (status or {}).get("redis")
    if not isinstance(redis, dict):
        return kept_in
    mode = redis.get("mode") if redis.get("mode") != "standalone" else None
    return ", ".join(str(part) for part in (kept_in or redis.get("url"), redis.get("version"), mode) if part) or None


def chaos_events(facts: RunFacts) -> list[ChaosEvent]:
    """Return the faults in order of time."""
    spans = _pairs(client.spans_s for client in facts.clients)
    promises = _pairs(client.promises_s for client in facts.clients)
    return [
        ChaosEvent(
            at_s=round(done.began_s - facts.started_s, 3),
            what=done.fault.value,
            lasted_s=round(done.over_s - done.began_s, 3),
            recovered_after_s=recovered_after_s(done, spans, promises),
        )
        for done in sorted(facts.breaks, key=lambda done: done.began_s)
    ]


def _pairs(parts: Iterable[bytes]) -> npt.NDArray[np.float64]:
    return np.frombuffer(b"".join(parts), dtype="<f8").reshape(-1, 2)


def _simulator(seen: Observations, allowed_executions: int) -> SimulatorReport | None:
    first, last = seen.first_stats, seen.last_stats
    if first is None or last is None:
        return None
    lives = [*seen.ended_stats, last]

    def grown(name: str) -> int:
        return sum(int(life.get(name, 0)) for life in lives) - int(first.get(name, 0))

    by_source_ip: Counter[str] = Counter()
    for life in lives:
        by_source_ip.update(life.get("by_source_ip") or {})
    by_source_ip.subtract(first.get("by_source_ip") or {})
    return SimulatorReport(
        cpu_seconds=seen.simulators.cpu_seconds,
        executions=grown("executions"),
        allowed_executions=allowed_executions,
        peak_in_flight=max(life.get("peak_in_flight", 0) for life in lives),
        aborted=grown("aborted"),
        duplicate_request_ids=sum(duplicates(life.get("by_request_id")) for life in lives)
        - duplicates(first.get("by_request_id")),
        concurrent_duplicates=grown("concurrent_duplicates"),
        by_source_ip={ip: count for ip, count in by_source_ip.items() if count > 0},
    )


def duplicates(by_request_id: Any) -> int:
    """Return the executions beyond the first of each sample.

    `by_request_id` is what the simulator reports: that number, or the executions of each sample.
    """
    if isinstance(by_request_id, dict):
        return sum(count - 1 for count in by_request_id.values() if isinstance(count, int) and count > 1)
    return by_request_id if isinstance(by_request_id, int) else 0


def _grown(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None, section: str, name: str) -> Any:
    """Return how much a counter of /status grew, or None if /status does not have it."""
    before, after = ((status or {}).get(section) or {} for status in (first, last))
    if name not in before or name not in after or before[name] is None or after[name] is None:
        return None
    return after[name] - before[name]


def _versions(status: Mapping[str, Any] | None, sdk_version: str | None) -> dict[str, str]:
    found = {"tinker": sdk_version} if sdk_version is not None else {}
    for name in _REPORTED_PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    redis = (status or {}).get("redis") or {}
    if redis.get("version"):
        found["redis-server"] = str(redis["version"])
    return found
