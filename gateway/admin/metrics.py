"""`/metrics`: the view in Prometheus' words.

Labels are bounded by the configuration: slots, upstream URLs, and the words of `_LABELLED`. A counter that is not in
that table appears under its own name, so that a new one needs no change here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.admin.report import upstreams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.admin.view import SlotView, View

_PREFIX: Final = "gateway_"

# counter -> (metric, label name, label value)
_LABELLED: Final = {
    "completed": ("samples_settled", "outcome", "completed"),
    "failed": ("samples_settled", "outcome", "failed"),
    "cancelled": ("samples_settled", "outcome", "cancelled"),
    "stale": ("samples_settled", "outcome", "stale"),
    "orphaned": ("samples_settled", "outcome", "orphaned"),
    "faults_never_executed": ("upstream_faults", "class", "never_executed"),
    "faults_interrupted": ("upstream_faults", "class", "interrupted"),
    "faults_aborted": ("upstream_faults", "class", "aborted"),
    "faults_ambiguous": ("upstream_faults", "class", "ambiguous"),
    "faults_refused": ("upstream_faults", "class", "refused"),
    "rejected_in_flight": ("samples_rejected", "reason", "in_flight"),
    "rejected_bytes": ("samples_rejected", "reason", "bytes"),
    "rejected_store": ("samples_rejected", "reason", "store"),
    "rejected_draining": ("samples_rejected", "reason", "draining"),
    "rejected_key": ("samples_rejected", "reason", "key"),
    "rejected_share": ("samples_rejected", "reason", "share"),
    "http_client_errors": ("http_errors", "class", "client"),
    "http_server_errors": ("http_errors", "class", "server"),
}
_PLAIN: Final = {
    "begun": "samples_begun",
    "delivered": "results_delivered",
    "acknowledged": "results_acknowledged",
    "expired_undelivered": "results_expired_undelivered",
    "duplicates_suppressed": "submissions_duplicate",
    "cpu_seconds": "worker_cpu_seconds",
}
_HELP: Final = {
    "samples_settled": "Samples that reached their one terminal state",
    "samples_begun": "Samples accepted",
    "samples_rejected": "Submissions answered with 429, by the limit that was reached",
    "upstream_faults": "Upstream attempts that failed, by what may be done about it",
    "results_delivered": "Results handed over to a client that was still connected",
    "results_expired_undelivered": "Results that nobody fetched in time",
    "worker_cpu_seconds": "User and system CPU of all worker processes, those that ended included",
}


class _ViewCollector(Collector):
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        yield from _counters(self._view)
        yield from _workers(self._view)
        yield from _upstreams(self._view)
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
        if name in _LABELLED:
            metric, label, word = _LABELLED[name]
            family = families.setdefault(metric, _counter(metric, [label]))
            family.add_metric([word], value)
        else:
            metric = _PLAIN.get(name, name)
            families.setdefault(metric, _counter(metric, [])).add_metric([], value)
    yield from families.values()


def _workers(view: View) -> Iterator[Metric]:
    up = _gauge("worker_up", "1 while the slot has a ready worker", None, "slot")
    restarts = _counter("worker_restarts", ["slot"])
    in_flight = _gauge("samples_in_flight", "Samples that run now", None, "slot")
    in_flight_bytes = _gauge("in_flight_bytes", "Prompts and unsaved results held now", None, "slot")
    rss = _gauge("worker_rss_bytes", "Resident memory", None, "slot")
    lag_p99 = _gauge("worker_loop_lag_ms_p99", "Event loop lag of the last second, 99th percentile", None, "slot")
    lag_max = _gauge("worker_loop_lag_ms_max", "Event loop lag of the last second, highest", None, "slot")
    sessions = _gauge("sessions", "Sessions that the worker knows", None, "slot")
    for slot in view.slots:
        label = [str(slot.slot)]
        up.add_metric(label, slot.state == "ready")
        restarts.add_metric(label, slot.restarts)
        rss.add_metric(label, slot.usage.rss_bytes)
        in_flight.add_metric(label, _status_value(slot, "in_flight"))
        in_flight_bytes.add_metric(label, _status_value(slot, "in_flight_bytes"))
        lag_p99.add_metric(label, _status_value(slot, "loop_lag_ms_p99"))
        lag_max.add_metric(label, _status_value(slot, "loop_lag_ms_max"))
        sessions.add_metric(label, _status_value(slot, "sessions"))
    yield from (up, restarts, rss, in_flight, in_flight_bytes, lag_p99, lag_max, sessions)


def _upstreams(view: View) -> Iterator[Metric]:
    up = _gauge("upstream_up", "1 when a worker finds it up", None, "upstream")
    in_flight = _gauge("upstream_in_flight", "Requests that run there now", None, "upstream")
    raw = _gauge("upstream_logprobs_raw", "1 when its sampled logprobs do not heed the temperature", None, "upstream")
    for entry in upstreams(view):
        up.add_metric([entry["url"]], entry["state"] == "up")
        in_flight.add_metric([entry["url"]], entry["in_flight"])
        if entry["logprobs_scale"] is not None:
            raw.add_metric([entry["url"]], not entry["logprobs_scale"])
    yield from (up, in_flight, raw)


def _redis(view: View) -> Iterator[Metric]:
    yield _gauge("redis_up", "1 while Redis answers the supervisor", view.redis is not None)
    if view.redis is not None:
        yield _gauge("redis_used_bytes", "Memory in use", view.redis.used_bytes)
        yield _gauge("redis_max_bytes", "maxmemory, 0 when unlimited", view.redis.max_bytes)


def _status_value(slot: SlotView, name: str) -> float:
    return float(getattr(slot.status, name)) if slot.status is not None else 0.0


def _counter(metric: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + metric, _HELP.get(metric, metric.replace("_", " ")), labels=labels)


def _gauge(name: str, help_: str, value: float | None, label: str | None = None) -> GaugeMetricFamily:
    if value is None:
        return GaugeMetricFamily(_PREFIX + name, help_, labels=[label] if label else [])
    return GaugeMetricFamily(_PREFIX + name, help_, value=float(value))
