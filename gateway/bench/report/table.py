"""Write the report for a terminal: short, with units, and without what was not measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from gateway.bench.report.report import verdicts

if TYPE_CHECKING:
    from gateway.bench.report.report import Quantiles, Report, Samples

    Row = tuple[str, str]

_MIB: Final = 1024 * 1024
_SHOWN_IPS: Final = 8


def render(report: Report) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows(report):
        table.add_row(name, Text(value), style="yellow" if name == "warning" else None)
    return table


def rows(report: Report) -> list[Row]:
    """Return (name, text) of each row; a row without a measurement is left out."""
    candidates = [
        ("samples", samples_line(report.samples)),
        ("misbehaviour", _misbehaviour(report.samples)),
        ("failures", ", ".join(f"{count} x {kind}" for kind, count in report.failures.items())),
        ("recovered", _chaos(report)),
        ("rate", f"{report.samples_per_second:,.0f} samples/s, {report.seconds:.1f} s in total"),
        ("latency", _quantiles(report.latency_s)),
        ("submit", _quantiles(report.submit_latency_s)),
        ("waiting", _waiting(report)),
        ("workers", _workers(report)),
        ("memory", _memory(report)),
        ("health", _health(report)),
        ("results in", _redis(report)),
        ("simulated vLLM", _simulator(report)),
        ("source IPs", _source_ips(report)),
        ("client", _client(report)),
        ("per sample", _wires(report)),
        *(("warning", sentence) for sentence in report.warnings),
    ]
    return [(name, value) for name, value in candidates if value]


def verdict_line(report: Report) -> str:
    """Return the verdict in one line."""
    complaints = verdicts(report)
    if complaints:
        return "NOT OK: " + "; ".join(complaints)
    checked = ["nothing lost", *["nothing wrong"] * report.samples.verified]
    if report.simulator is not None:
        again = report.simulator.allowed_executions > report.samples.requested
        checked.append("nothing executed more often than allowed" if again else "nothing executed twice")
    return "OK: " + ", ".join(checked)


def samples_line(samples: Samples) -> str:
    check = "" if samples.verified else " (contents not verified)"
    failed = f"{samples.failed - samples.wrong} failed, {samples.wrong} wrong, {samples.lost} lost"
    resubmitted = f", {samples.resubmitted:,} resubmitted" if samples.resubmitted else ""
    return f"{samples.completed:,} of {samples.requested:,} ok{check}, {failed}{resubmitted}"


def _misbehaviour(samples: Samples) -> str:
    made = [
        (samples.duplicates, "submitted twice"),
        (samples.abandoned_polls, "polls dropped"),
        (samples.cancelled, "cancelled"),
    ]
    return ", ".join(f"{count:,} {what}" for count, what in made if count)


def _chaos(report: Report) -> str:
    return "; ".join(
        f"{event.what} at {event.at_s:.1f} s"
        + (f" in {_s(event.recovered_after_s)}" if event.recovered_after_s is not None else ": not before the end")
        for event in report.chaos
    )


def _quantiles(values: Quantiles | None) -> str:
    if values is None:
        return ""
    return f"p50 {_s(values.p50)}, p90 {_s(values.p90)}, p99 {_s(values.p99)}, max {_s(values.max)}"


def _waiting(report: Report) -> str:
    client = report.client
    if client.polls is None or client.session_polls is None:
        return ""
    pauses = f"; {client.paused:,} submissions delayed by 429" if client.paused else ""
    if client.session_poll:
        return f"session poll: {client.session_polls:,} polls, {client.polls:,} fetches{pauses}"
    return f"one poll per sample: {client.polls:,} polls{pauses}"


def _workers(report: Report) -> str:
    gateway = report.gateway
    if gateway.cpu_seconds is None:
        return ""
    per_sample = f", {gateway.cpu_ms_per_sample:.2f} ms per sample" if gateway.cpu_ms_per_sample is not None else ""
    return f"{_processes(gateway.workers)}, {gateway.cpu_seconds:.2f} s CPU{per_sample}"


def _memory(report: Report) -> str:
    parts = [
        ("workers", report.gateway.peak_rss_bytes),
        ("largest worker", report.gateway.peak_rss_bytes_per_worker),
        ("Redis", report.redis.peak_bytes),
    ]
    texts = [f"{name} {value / _MIB:,.0f} MiB" for name, value in parts if value is not None]
    return ", ".join(texts) + " at most" if texts else ""


def _health(report: Report) -> str:
    gateway = report.gateway
    parts = []
    if gateway.healthz_ms is not None and gateway.healthz_ms.p50 is not None:
        health = gateway.healthz_ms
        parts.append(f"healthz p50 {health.p50:.1f} ms, p99 {health.p99:.1f} ms, max {health.max:.0f} ms")
    if gateway.healthz_failures:
        parts.append(f"{gateway.healthz_failures} probes unanswered")
    client = report.client
    if client.heartbeats and client.heartbeat_max_s is not None:
        failed = f", {client.heartbeats_failed} failed" if client.heartbeats_failed else ""
        parts.append(f"slowest of {client.heartbeats} heartbeats {_s(client.heartbeat_max_s)}{failed}")
    if gateway.loop_lag_ms is not None:
        parts.append(f"loop lag max {gateway.loop_lag_ms.max:.0f} ms")
    return "; ".join(parts)


def _redis(report: Report) -> str:
    redis = report.redis
    parts = [redis.description or ""]
    parts.append(
        f"{redis.commands_per_sample:.1f} commands per sample" if redis.commands_per_sample is not None else ""
    )
    parts.append(f"{redis.cpu_seconds:.2f} s CPU" if redis.cpu_seconds is not None else "")
    return ", ".join(part for part in parts if part)


def _simulator(report: Report) -> str:
    simulator = report.simulator
    if simulator is None:
        return ""
    cpu = f", {simulator.cpu_seconds:.2f} s CPU" if simulator.cpu_seconds is not None else ""
    return (
        f"{simulator.executions:,} executions, at most {simulator.peak_in_flight:,} at once, "
        f"{simulator.aborted:,} aborted, {simulator.duplicate_request_ids:,} duplicates{cpu}"
    )


def _source_ips(report: Report) -> str:
    if report.simulator is None:
        return ""
    seen = sorted(report.simulator.by_source_ip.items())
    shown = ", ".join(f"{address} ({count:,})" for address, count in seen[:_SHOWN_IPS])
    return shown + (f" and {len(seen) - _SHOWN_IPS} more" if len(seen) > _SHOWN_IPS else "")


def _processes(count: int | None) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _client(report: Report) -> str:
    client = report.client
    per_sample = f", {client.cpu_ms_per_sample:.2f} ms per sample" if client.cpu_ms_per_sample is not None else ""
    text = f"{_processes(client.processes)}, {client.cpu_seconds:.2f} s CPU{per_sample}"
    if sdk := report.versions.get("tinker"):
        text = f"tinker {sdk}: {text}"
    if client.requests is None or client.connections is None:
        return text
    return f"{text}; {client.requests:,} requests on {client.connections:,} connections"


def _wires(report: Report) -> str:
    """Format the bytes per sample to and from the gateway, in kB of 1,000 bytes."""
    completed = report.samples.completed
    if not completed:
        return ""
    wires = [("clients", report.wires.client), ("upstream", report.wires.upstream), ("Redis", report.wires.redis)]
    return ", ".join(
        f"{name} {wire.received_bytes / completed / 1e3:,.1f} kB in, {wire.sent_bytes / completed / 1e3:,.1f} kB out"
        for name, wire in wires
        if wire is not None
    )


def _s(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
