"""The bench report as a struct, its verdict, and the arithmetic that merges the reports of the client processes. Pure.

Field names are those of the JSON (docs/interface.md). A value that could not be measured is null, never zero.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from gateway.bench.watch.procfs import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from gateway.bench.load import messages


class Samples(msgspec.Struct, kw_only=True):
    """Counts of samples. `failed` includes the wrong ones; `lost` ones neither completed, failed nor were cancelled."""

    requested: int
    completed: int
    failed: int
    wrong: int
    resubmitted: int
    cancelled: int = 0
    duplicates: int = 0
    abandoned_polls: int = 0
    verified: bool = True

    @property
    def lost(self) -> int:
        return self.requested - self.completed - self.failed - self.cancelled


class Quantiles(msgspec.Struct, kw_only=True):
    p50: float
    p90: float
    p99: float
    max: float


class Tail(msgspec.Struct, kw_only=True):
    p50: float | None = None
    p99: float
    max: float


class Gateway(msgspec.Struct, kw_only=True):
    """The gateway's share. `cpu_seconds`: user + system of all workers. `peak_rss_bytes`: all workers at one moment."""

    cpu_seconds: float | None = None
    cpu_ms_per_sample: float | None = None
    peak_rss_bytes: int | None = None
    peak_rss_bytes_per_worker: int | None = None
    peak_fds: int | None = None
    healthz_ms: Tail | None = None
    healthz_failures: int = 0
    loop_lag_ms: Tail | None = None
    workers: int | None = None
    reexecutions: int | None = None


class Redis(msgspec.Struct, kw_only=True):
    cpu_seconds: float | None = None
    peak_bytes: int | None = None
    commands_per_sample: float | None = None
    description: str | None = None


class SimulatorReport(msgspec.Struct, kw_only=True):
    """The counts of the simulated vLLM. `cpu_seconds` of all its processes is None if bench did not start them.

    `allowed_executions` are those that the samples, their resubmissions and the gateway's re-executions account for.
    `duplicate_request_ids` are executions beyond the first of their sample, one after the other;
    `concurrent_duplicates` began while another execution of their sample was running.
    """

    cpu_seconds: float | None = None
    executions: int
    allowed_executions: int
    peak_in_flight: int
    aborted: int
    duplicate_request_ids: int
    concurrent_duplicates: int = 0
    by_source_ip: dict[str, int] = {}


class Client(msgspec.Struct, kw_only=True):
    """The load clients. With the published SDK, None marks what it does inside; the gateway then counts the polls."""

    processes: int
    cpu_seconds: float
    cpu_ms_per_sample: float | None
    session_poll: bool | None
    requests: int | None
    connections: int | None
    polls: int | None
    session_polls: int | None
    paused: int | None
    heartbeats: int | None
    heartbeats_failed: int | None
    heartbeat_max_s: float | None
    peak_rss_bytes: int


class Wire(msgspec.Struct, kw_only=True):
    """Bytes that the gateway received and sent, without the headers of TCP and IP."""

    received_bytes: int
    sent_bytes: int


class Wires(msgspec.Struct, kw_only=True):
    """Bytes by peer, each counted by the peer: the load client, the simulated vLLM, Redis."""

    client: Wire | None = None
    upstream: Wire | None = None
    redis: Wire | None = None


class ChaosEvent(msgspec.Struct, kw_only=True):
    """A fault, `at_s` after the first sample.

    `lasted_s` is the time until the broken part ran again, which is not the gateway's doing; `recovered_after_s` is the
    time from then until the gateway served as before (chaos.py), or None if the run ended first.
    """

    at_s: float
    what: str
    lasted_s: float
    recovered_after_s: float | None


class Report(msgspec.Struct, kw_only=True):
    """One run. `warnings` are sentences on what else than the gateway may have set the pace (usage.py)."""

    samples: Samples
    failures: dict[str, int]
    examples: list[str]
    seconds: float
    samples_per_second: float
    submit_latency_s: Quantiles | None
    latency_s: Quantiles | None
    gateway: Gateway
    redis: Redis
    simulator: SimulatorReport | None
    client: Client
    wires: Wires
    chaos: list[ChaosEvent]
    warnings: list[str]
    machine: Machine
    versions: dict[str, str]
    config: dict[str, Any]


# Keeps the rate of an empty run finite.
_MIN_SECONDS: Final = 1e-6


def to_json(*reports: Report) -> bytes:
    """Return indented JSON: a single report as it is, several as `{"runs": [...]}` in the order of the runs."""
    document = reports[0] if len(reports) == 1 else {"runs": reports}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def exit_code(*reports: Report) -> int:
    """Return 1 if any sample was lost, failed, wrong, or executed more often than the retry policy allows, else 0."""
    return 1 if any(map(verdicts, reports)) else 0


def verdicts(report: Report) -> list[str]:
    """Return one sentence for each thing that is wrong with the run."""
    samples, simulator = report.samples, report.simulator
    checks = [
        (samples.lost != 0, f"{samples.lost} samples neither completed nor failed"),
        (samples.failed > samples.wrong, f"{samples.failed - samples.wrong} samples failed"),
        (samples.wrong > 0, f"{samples.wrong} samples got something that is not their result"),
    ]
    if simulator is not None:
        # The re-executions that the gateway counted, and those that killed workers could not report.
        again = simulator.allowed_executions - samples.requested - samples.resubmitted
        checks += [
            (
                simulator.executions > simulator.allowed_executions,
                f"{simulator.executions} executions at the upstream, where {simulator.allowed_executions} are allowed",
            ),
            (
                simulator.duplicate_request_ids > again,
                f"{simulator.duplicate_request_ids} samples were executed again outside the retry policy",
            ),
            (
                simulator.concurrent_duplicates > 0,
                f"{simulator.concurrent_duplicates} samples were executed twice at the same time",
            ),
        ]
    return [sentence for bad, sentence in checks if bad]


def allowed_executions(requested: int, resubmitted: int, reexecutions: int | None, unreported: int = 0) -> int:
    """Return the number of executions allowed: one for each promise, and those that the gateway counted as repeated.

    `unreported` is what killed workers may have executed again since their last report.
    """
    return requested + resubmitted + (reexecutions or 0) + unreported


def quantiles(values: npt.NDArray[np.float32]) -> Quantiles | None:
    """Return the quantiles, or None if there are no values."""
    if not values.size:
        return None
    p50, p90, p99, top = np.quantile(values, [0.5, 0.9, 0.99, 1.0]).tolist()
    return Quantiles(p50=p50, p90=p90, p99=p99, max=top)


def tail(values: Sequence[float]) -> Tail | None:
    """Return median, p99 and maximum, or None if there are no values."""
    if not values:
        return None
    p50, p99, top = np.quantile(np.asarray(values), [0.5, 0.99, 1.0]).tolist()
    return Tail(p50=p50, p99=p99, max=top)


def per(total: float | None, count: int) -> float | None:
    """Return `total` / `count`, or None if that is not defined."""
    return None if total is None or count <= 0 else total / count


def rate(count: int, seconds: float) -> float:
    return count / max(seconds, _MIN_SECONDS)


def merge_samples(reports: Sequence[messages.ClientReport], requested: int, *, verified: bool) -> Samples:
    return Samples(
        requested=requested,
        completed=sum(report.completed for report in reports),
        failed=sum(report.failed for report in reports),
        wrong=sum(report.wrong for report in reports),
        resubmitted=sum(report.resubmitted for report in reports),
        cancelled=sum(report.cancelled for report in reports),
        duplicates=sum(report.duplicates for report in reports),
        abandoned_polls=sum(report.abandoned_polls for report in reports),
        verified=verified,
    )


def merge_client(reports: Sequence[messages.ClientReport], *, session_poll: bool | None) -> Client:
    cpu_seconds = sum(report.cpu_seconds for report in reports)
    cpu_ms_per_sample = per(cpu_seconds * 1e3, sum(report.completed for report in reports))
    slowest = [report.heartbeat_max_s for report in reports if report.heartbeat_max_s is not None]
    return Client(
        processes=len(reports),
        cpu_seconds=cpu_seconds,
        cpu_ms_per_sample=cpu_ms_per_sample,
        session_poll=session_poll,
        requests=total(report.requests for report in reports),
        connections=total(report.connections for report in reports),
        polls=total(report.polls for report in reports),
        session_polls=total(report.session_polls for report in reports),
        paused=total(report.paused for report in reports),
        heartbeats=total(report.heartbeats for report in reports),
        heartbeats_failed=total(report.heartbeats_failed for report in reports),
        heartbeat_max_s=max(slowest, default=None),
        peak_rss_bytes=sum(report.peak_rss_bytes for report in reports),
    )


def total(counts: Iterable[int | None]) -> int | None:
    """Return the sum, or None if one of the counts is unknown."""
    values = list(counts)
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def merge_wire(reports: Sequence[messages.ClientReport]) -> Wire | None:
    """Return the bytes between clients and gateway, seen from the gateway, or None if a client does not count them."""
    sent, received = (total(getattr(report, name) for report in reports) for name in ("sent_bytes", "received_bytes"))
    return None if sent is None or received is None else Wire(received_bytes=sent, sent_bytes=received)


def merge_failures(reports: Iterable[messages.ClientReport]) -> dict[str, int]:
    """Add up the failures of all clients, the most frequent first."""
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report.failures)
    return dict(total.most_common())


def merge_latencies(parts: Iterable[bytes]) -> npt.NDArray[np.float32]:
    """Join the clients' float32 little-endian arrays."""
    return np.frombuffer(b"".join(parts), dtype="<f4")
