"""`/metrics`: the view in the format of Prometheus.

The configuration bounds the labels: slots, upstream URLs, names of keys, and the words in this module. A counter of the
workers without a row in `_COUNTERS` or a prefix in `_FAMILIES` appears under its own name, so that none is missed.
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

    from gateway.admin.view import View

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
# prefix of a counter's name -> (metric, label name); the rest of the name is the label's value
_FAMILIES: Final = {"faults_": ("upstream_faults", "class"), "rejected_": ("samples_rejected", "reason")}
_HELP: Final = {
    "samples_begun": "Samples accepted",
    "samples_settled": "Samples settled, by outcome",
    "samples_rejected": "Requests answered with 429, by reason",
    "samples_reexecuted": "Samples executed again after an interruption",
    "submissions_duplicate": "Repeated submissions, answered with the first promise",
    "results_delivered": "Results delivered to a client that was still connected",
    "results_acknowledged": "Results acknowledged by the client",
    "results_expired_undelivered": "Results that no client fetched in time",
    "results_late": "Results dropped because their sample was already settled",
    "result_bytes": "Bytes of results written to Redis",
    "tokens_sampled": "Tokens in results",
    "mixed_weights": "Sequences during which the upstream's weights changed",
    "upstream_attempts": "Requests sent upstream",
    "upstream_faults": "Failed upstream attempts, by class of failure",
    "http_requests": "Requests to the public address",
    "http_errors": "Replies with 4xx (without 408) and 5xx",
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
    """Write the view in the text format, version 0.0.4."""
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


# metric -> (help, field of a worker's status)
_WORKER_GAUGES: Final = {
    "samples_in_flight": ("Samples running now", "in_flight"),
    "samples_paused": ("Those of them that wait because no upstream accepts them", "paused"),
    "in_flight_bytes": ("Memory of prompts, unsaved results, bodies and unread replies", "in_flight_bytes"),
    "passed_in_flight": ("Requests being passed through", "passed_in_flight"),
    "worker_loop_lag_ms_p99": ("Event loop lag of the last minute, 99th percentile", "loop_lag_ms_p99"),
    "worker_loop_lag_ms_max": ("Event loop lag of the last minute, highest", "loop_lag_ms_max"),
    "worker_store_connected": ("1 while the worker is connected to Redis", "store_connected"),
    "sessions": ("Sessions known to the worker", "sessions"),
}


def _workers(view: View) -> Iterator[Metric]:
    up = _gauge("worker_up", "1 while the slot has a ready worker", None, "slot")
    restarts = _counter("worker_restarts", ["slot"], "Workers replaced in the slot, including rolls")
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
            gauge.add_metric([str(slot.slot)], float(getattr(slot.status, field)) if slot.status is not None else 0.0)
        yield gauge


def _latencies(view: View) -> Iterator[Metric]:
    stages = HistogramMetricFamily(
        _PREFIX + "stage_seconds",
        "Time of a sample by stage: accept (until it is in Redis), queue (wait for an upstream connection),"
        " upstream (until the whole reply), store (until the result is in Redis), delivery (until a client has it)",
        labels=["stage"],
    )
    for stage, histogram in view.since_start.stages.items():
        stages.add_metric([stage], *_buckets(histogram))
    upstream = HistogramMetricFamily(
        _PREFIX + "upstream_seconds", "Time until an upstream's complete reply", labels=["upstream"]
    )
    for url, totals in view.since_start.upstreams.items():
        upstream.add_metric([url], *_buckets(totals.latency))
    yield from (stages, upstream)


def _buckets(histogram: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets and the sum. Only every doubling is a bucket, although the gateway has finer ones.

    Alerts need no more, and all of them would mean four times as many series for every stage and upstream.
    """
    *counts, seconds = histogram
    below = list(accumulate(counts))
    buckets = list(zip(map(str, BOUNDS_S[::PER_DOUBLING]), below[::PER_DOUBLING], strict=False))
    return [*buckets, ("+Inf", below[-1])], seconds


def _upstreams(view: View) -> Iterator[Metric]:
    up = _gauge("upstream_up", "1 if it is up for some worker", None, "upstream")
    in_flight = _gauge("upstream_in_flight", "Requests that run there or wait for a connection", None, "upstream")
    raw = _gauge("upstream_logprobs_raw", "1 if its sampled logprobs ignore the temperature", None, "upstream")
    failures = _counter("upstream_failures", ["upstream"], "Failed attempts, without clients' mistakes")
    wasted = _counter(
        "upstream_wasted_seconds", ["upstream"], "Time of requests that were cut off: cancelled, stale, given up"
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
    in_flight = _gauge("key_samples_in_flight", "Samples running now, by name of the API key", None, "key")
    begun = _counter("key_samples_begun", ["key"], "Samples accepted, by name of the API key")
    rejected = _counter("key_samples_rejected", ["key"], "Requests answered with 429, by name of the API key")
    for key in view.keys:
        in_flight.add_metric([key.name], key.in_flight)
        begun.add_metric([key.name], key.samples)
        rejected.add_metric([key.name], key.rejected)
    yield from (in_flight, begun, rejected)


def _redis(view: View) -> Iterator[Metric]:
    waiting = undelivered(view.totals)
    yield _gauge("undelivered_results", "Results that no client has fetched yet", waiting["results"])
    yield _gauge("undelivered_bytes", "Their size, estimated from the mean size of a result", waiting["bytes"])
    yield _gauge("redis_up", "1 while Redis answers the supervisor", view.redis is not None)
    if view.redis is not None:
        yield _gauge("redis_lag_ms", "Round trip from the supervisor", view.redis_lag_ms)
        yield _gauge("redis_used_bytes", "Memory in use", view.redis.used_bytes)
        yield _gauge("redis_max_bytes", "maxmemory, 0 if unlimited", view.redis.max_bytes)


def _counter(metric: str, labels: list[str], help_: str = "") -> CounterMetricFamily:
    text = help_ or _HELP.get(metric, metric.replace("_", " "))
    return CounterMetricFamily(_PREFIX + metric, text, labels=labels)


def _gauge(name: str, help_: str, value: float | None, label: str | None = None) -> GaugeMetricFamily:
    if value is None:
        return GaugeMetricFamily(_PREFIX + name, help_, labels=[label] if label else [])
    return GaugeMetricFamily(_PREFIX + name, help_, value=float(value))
