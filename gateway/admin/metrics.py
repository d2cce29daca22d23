"""`/metrics`: the view in Prometheus' words.

Labels are bounded by the configuration: slots, upstream URLs, names of keys, and the words that stand here. A counter
of the workers that has no row in `_COUNTERS` and none of the prefixes appears under its own name, so that a new one is
never lost.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.admin.report import undelivered, upstreams
from shared.histogram import BOUNDS_S, PER_DOUBLING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from gateway.admin.view import SlotView, View

_PREFIX: Final = "gateway_"

# counter -> (metric, label name, label value)
_COUNTERS: Final = {
    "begun": ("samples_begun", "", ""),
    "completed": ("samples_settled", "outcome", "completed"),
    "failed": ("samples_settled", "outcome", "failed"),
    "cancelled": ("samples_settled", "outcome", "cancelled"),
    "stale": ("samples_settled", "outcome", "stale"),
    "orphaned": ("samples_settled", "outcome", "orphaned"),
    "delivered": ("results_delivered", "", ""),
    "acknowledged": ("results_acknowledged", "", ""),
    "expired_undelivered": ("results_expired_undelivered", "", ""),
    "duplicates_suppressed": ("submissions_duplicate", "", ""),
    "reexecutions": ("samples_reexecuted", "", ""),
    "attempts": ("upstream_attempts", "", ""),
    "http_client_errors": ("http_errors", "class", "client"),
    "http_server_errors": ("http_errors", "class", "server"),
    "cpu_seconds": ("worker_cpu_seconds", "", ""),
}
# start of a counter's name -> (metric, label name); the rest of the name is the label's value
_FAMILIES: Final = {"faults_": ("upstream_faults", "class"), "rejected_": ("samples_rejected", "reason")}
_HELP: Final = {
    "samples_begun": "Samples accepted",
    "samples_settled": "Samples that reached their one terminal state",
    "samples_rejected": "Requests answered with 429, by reason",
    "samples_reexecuted": "Executions again after an interruption",
    "submissions_duplicate": "Submissions answered with an earlier promise",
    "results_delivered": "Results handed over to a client that was still connected",
    "results_acknowledged": "Results that the client has confirmed",
    "results_expired_undelivered": "Results that nobody fetched in time",
    "results_late": "Results dropped because their sample had ended otherwise",
    "result_bytes": "Bytes of results written to Redis",
    "tokens_sampled": "Tokens in results",
    "mixed_weights": "Sequences in whose middle the upstream's weights changed",
    "upstream_attempts": "Requests sent upstream",
    "upstream_faults": "Upstream attempts that failed, by what may be done about it",
    "http_requests": "Requests to the public address",
    "http_errors": "Replies with 4xx (408 apart) and 5xx",
    "polls": "Polls for one sample",
    "polls_abandoned": "Polls whose client left",
    "session_polls": "Polls for a whole sampling session",
    "store_commands": "Commands sent to Redis",
    "adapter_loads": "LoRA adapters that an upstream has loaded because the gateway asked it to",
    "adapter_loads_failed": "LoRA adapters that an upstream did not load when it was asked to",
    "worker_cpu_seconds": "User and system CPU of all worker processes, those that ended included",
}


class _ViewCollector(Collector):
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        yield from _counters(self._view)
        yield from _workers(self._view)
        yield from _latencies(self._view)
        yield from _upstreams(self._view)
        yield from _keys(self._view)
        yield from _redis(self._view)
        yield _gauge("supervisor_loop_lag_ms", "Lag of the supervisor's event loop", self._view.loop_lag_ms)


def exposition(view: View) -> bytes:
    """The text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ViewCollector(view))
    return generate_latest(registry)


def _counters(view: View) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    for name, value in sorted(view.totals.items()):
        metric, label, word = _metric_of(name)
        family = families.setdefault(metric, _counter(metric, [label] if label else []))
        family.add_metric([word] if label else [], value)
    yield from families.values()


def _metric_of(counter: str) -> tuple[str, str, str]:
    for prefix, (metric, label) in _FAMILIES.items():
        if counter.startswith(prefix):
            return metric, label, counter.removeprefix(prefix)
    return _COUNTERS.get(counter, (counter, "", ""))


# metric -> (what it tells, the field of a worker's own status)
_WORKER_GAUGES: Final = {
    "samples_in_flight": ("Samples that run now", "in_flight"),
    "samples_paused": ("Of those, samples that wait because no upstream takes them", "paused"),
    "in_flight_bytes": ("Prompts and unsaved results held now", "in_flight_bytes"),
    "passed_in_flight": ("Requests that are passed through now", "passed_in_flight"),
    "worker_loop_lag_ms_p99": ("Event loop lag of the last minute, 99th percentile", "loop_lag_ms_p99"),
    "worker_loop_lag_ms_max": ("Event loop lag of the last minute, highest", "loop_lag_ms_max"),
    "worker_store_connected": ("1 while the worker is connected to Redis", "store_connected"),
    "sessions": ("Sessions that the worker knows", "sessions"),
}


def _workers(view: View) -> Iterator[Metric]:
    up = _gauge("worker_up", "1 while the slot has a ready worker", None, "slot")
    restarts = _counter("worker_restarts", ["slot"], "Workers replaced in the slot, rolls included")
    rss = _gauge("worker_rss_bytes", "Resident memory", None, "slot")
    for slot in view.slots:
        label = [str(slot.slot)]
        up.add_metric(label, slot.state == "ready")
        restarts.add_metric(label, slot.restarts)
        rss.add_metric(label, slot.usage.rss_bytes)
    yield from (up, restarts, rss)
    for metric, (help_, field) in _WORKER_GAUGES.items():
        gauge = _gauge(metric, help_, None, "slot")
        for slot in view.slots:
            gauge.add_metric([str(slot.slot)], _status_value(slot, field))
        yield gauge


def _latencies(view: View) -> Iterator[Metric]:
    stages = HistogramMetricFamily(
        _PREFIX + "stage_seconds",
        "Time of a sample by stage: accept (entered into Redis), queue (waiting for an upstream connection),"
        " upstream (until its whole reply), store (written to Redis), delivery (until a client has it)",
        labels=["stage"],
    )
    for stage, histogram in view.since_start.stages.items():
        stages.add_metric([stage], *_buckets(histogram))
    upstream = HistogramMetricFamily(
        _PREFIX + "upstream_seconds", "Time of an upstream's complete replies", labels=["upstream"]
    )
    for url, totals in view.since_start.upstreams.items():
        upstream.add_metric([url], *_buckets(totals.latency))
    yield from (stages, upstream)


def _buckets(histogram: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative, as Prometheus wants them, and the sum. Every doubling is a bound, not all that the gateway knows.

    A series for each would be four times as many to store, for every stage and upstream; a factor is what alerts need.
    """
    *counts, seconds = histogram
    below = list(accumulate(counts))
    buckets = list(zip(map(str, BOUNDS_S[::PER_DOUBLING]), below[::PER_DOUBLING], strict=False))
    return [*buckets, ("+Inf", below[-1])], seconds


def _upstreams(view: View) -> Iterator[Metric]:
    up = _gauge("upstream_up", "1 when a worker finds it up", None, "upstream")
    in_flight = _gauge("upstream_in_flight", "Requests that run there, or wait for a connection, now", None, "upstream")
    raw = _gauge("upstream_logprobs_raw", "1 when its sampled logprobs do not heed the temperature", None, "upstream")
    failures = _counter("upstream_failures", ["upstream"], "Attempts that failed there, clients' mistakes apart")
    wasted = _counter(
        "upstream_wasted_seconds", ["upstream"], "Time of requests that were cut off there: cancelled, stale, given up"
    )
    for entry in upstreams(view):
        up.add_metric([entry["url"]], entry["state"] == "up")
        in_flight.add_metric([entry["url"]], entry["in_flight"])
        if entry["logprobs_scale"] is not None:
            raw.add_metric([entry["url"]], not entry["logprobs_scale"])
    for url, totals in view.since_start.upstreams.items():
        failures.add_metric([url], totals.faults)
        wasted.add_metric([url], totals.wasted_ms / 1000)
    yield from (up, in_flight, raw, failures, wasted)


def _keys(view: View) -> Iterator[Metric]:
    in_flight = _gauge("key_samples_in_flight", "Samples that run now, by the name of their API key", None, "key")
    begun = _counter("key_samples_begun", ["key"], "Samples accepted, by the name of their API key")
    rejected = _counter("key_samples_rejected", ["key"], "Requests answered with 429, by the name of their API key")
    for key in view.keys:
        in_flight.add_metric([key.name], key.in_flight)
        begun.add_metric([key.name], key.samples)
        rejected.add_metric([key.name], key.rejected)
    yield from (in_flight, begun, rejected)


def _redis(view: View) -> Iterator[Metric]:
    waiting = undelivered(view.totals)
    yield _gauge("undelivered_results", "Results that nobody has fetched yet", waiting["results"])
    yield _gauge("undelivered_bytes", "Their size, from the mean size of a result", waiting["bytes"])
    yield _gauge("redis_up", "1 while Redis answers the supervisor", view.redis is not None)
    if view.redis is not None:
        yield _gauge("redis_lag_ms", "Time of a round trip from the supervisor", view.redis_lag_ms)
        yield _gauge("redis_used_bytes", "Memory in use", view.redis.used_bytes)
        yield _gauge("redis_max_bytes", "maxmemory, 0 when unlimited", view.redis.max_bytes)


def _status_value(slot: SlotView, name: str) -> float:
    return float(getattr(slot.status, name)) if slot.status is not None else 0.0


def _counter(metric: str, labels: list[str], help_: str = "") -> CounterMetricFamily:
    text = help_ or _HELP.get(metric, metric.replace("_", " "))
    return CounterMetricFamily(_PREFIX + metric, text, labels=labels)


def _gauge(name: str, help_: str, value: float | None, label: str | None = None) -> GaugeMetricFamily:
    if value is None:
        return GaugeMetricFamily(_PREFIX + name, help_, labels=[label] if label else [])
    return GaugeMetricFamily(_PREFIX + name, help_, value=float(value))
