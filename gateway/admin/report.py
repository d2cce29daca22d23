"""`/status` and `/readyz`, made from a `View`. Pure; field names are part of the interface."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from gateway.admin.timings import UpstreamTotals
from shared.core.upstream_protocol import NO_GENERATE
from shared.histogram import count, quantile_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.admin.view import SlotView, View
    from shared.channel import Status, UpstreamStatus

_SAMPLE_COUNTERS: Final = (
    "begun",
    "completed",
    "failed",
    "cancelled",
    "stale",
    "orphaned",
    "delivered",
    "acknowledged",
    "expired_undelivered",
    "duplicates_suppressed",
    "reexecutions",
)
# Best first: workers may see an upstream differently, and the best state is shown.
_STATES: Final = ("up", "unknown", "resting", "leaving")
RAW_LOGPROBS: Final = "sampled logprobs ignore the temperature; start vLLM with --logprobs-mode processed_logprobs"

_NO_MODEL: Final = "no upstream lists it, so its samples fail; serve it, or map it with --model NAME=UPSTREAM_NAME"


def status(view: View) -> dict[str, Any]:
    spare = view.spare
    return {
        "gateway": {
            "url": view.url,
            "version": view.version,
            "started_at": timestamp(view.started_at_s),
            "stopping": view.stopping,
            "loop_lag_ms": round(view.loop_lag_ms, 3),
        },
        "workers": [_worker(slot) for slot in view.slots],
        "spare": {"state": spare.state, "pid": spare.pid, "rss_bytes": spare.usage.rss_bytes} if spare else None,
        "redis": _redis(view),
        "upstreams": upstreams(view),
        "warnings": warnings(view),
        "samples": {name: int(view.totals.get(name, 0)) for name in _SAMPLE_COUNTERS},
        "counters": {name: int(value) for name, value in sorted(view.totals.items()) if name != "cpu_seconds"},
        "undelivered": undelivered(view.totals),
        "stages_s": {stage: _quantiles(histogram) for stage, histogram in view.last_minute.stages.items()},
        "keys": [asdict(key) for key in view.keys],
        # Not a sum: requests of a session land on any worker, so in time each worker knows it.
        "sessions": max((status.sessions for status in _statuses(view)), default=0),
    }


def _worker(slot: SlotView) -> dict[str, Any]:
    status = slot.status
    return {
        "slot": slot.slot,
        "pid": slot.pid,
        "source_ip": slot.source_ip,
        "state": slot.state,
        "in_flight": status.in_flight if status else 0,
        "in_flight_bytes": status.in_flight_bytes if status else 0,
        "passed_in_flight": status.passed_in_flight if status else 0,
        "paused": status.paused if status else 0,
        "restarts": slot.restarts,
        "cpu_seconds": round(slot.usage.cpu_seconds, 3),
        "rss_bytes": slot.usage.rss_bytes,
        "loop_lag_ms_p99": status.loop_lag_ms_p99 if status else 0.0,
        "loop_lag_ms_max": status.loop_lag_ms_max if status else 0.0,
        "store_connected": status.store_connected if status else False,
        "draining": slot.draining,
        "started_at": timestamp(slot.started_at_s) if slot.started_at_s is not None else None,
    }


def _redis(view: View) -> dict[str, Any]:
    info = view.redis
    return {
        "url": view.redis_url,
        "embedded": view.redis_embedded,
        "reachable": info is not None,
        "mode": info.mode if info else "unknown",
        "version": info.version if info else "unknown",
        "used_bytes": info.used_bytes if info else 0,
        "max_bytes": info.max_bytes if info else 0,
        "policy": info.policy if info else "unknown",
        "lag_ms": round(view.redis_lag_ms, 3),
        "received_bytes": info.received_bytes if info else None,
        "sent_bytes": info.sent_bytes if info else None,
    }


def upstreams(view: View) -> list[dict[str, Any]]:
    """Return one entry per URL over all workers: up if it is up for one, resting if it is resting for all."""
    by_url: dict[str, list[UpstreamStatus]] = {}
    for status in _statuses(view):
        for upstream in status.upstreams:
            by_url.setdefault(upstream.url, []).append(upstream)
    return [
        {
            "url": url,
            "state": next((state for state in _STATES if any(entry.state == state for entry in entries)), "unknown"),
            "in_flight": sum(entry.in_flight for entry in entries),
            "failures": sum(entry.failures for entry in entries),
            "logprobs_scale": view.logprobs_scale.get(url),
            # Each worker finds this out by itself, perhaps at different times.
            "protocols": sorted({entry.protocol for entry in entries if entry.protocol is not None}),
            **_performance(view, url),
        }
        for url, entries in by_url.items()
    ]


def _performance(view: View, url: str) -> dict[str, Any]:
    total = view.since_start.upstreams.get(url, UpstreamTotals())
    recent = view.last_minute.upstreams.get(url, UpstreamTotals())
    return {
        "attempts": total.attempts,
        "failed_attempts": total.faults,
        "latency_s": _quantiles(recent.latency),
        "queue_s": _quantiles(recent.queue),
    }


def _quantiles(histogram: Sequence[float]) -> dict[str, float | None]:
    """Return p50 and p99 in seconds, or None if nothing was measured."""
    p50, p99 = (quantile_s(histogram, q) for q in (0.5, 0.99))
    return {"count": count(histogram), "p50": _rounded(p50), "p99": _rounded(p99)}


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None


def undelivered(totals: Mapping[str, float]) -> dict[str, int]:
    """Return how many results and errors the workers have not delivered, and about how large they are.

    A client that closes its connection right after reading may count as undelivered until it acknowledges.
    """
    settled = totals.get("completed", 0) + totals.get("failed", 0)
    fetched = max(totals.get("delivered", 0), totals.get("acknowledged", 0))
    waiting = max(settled - fetched - totals.get("expired_undelivered", 0), 0)
    mean_bytes = totals.get("result_bytes", 0) / settled if settled else 0
    return {"results": int(waiting), "bytes": int(waiting * mean_bytes)}


def readiness(view: View) -> tuple[bool, dict[str, Any]]:
    """Return whether Redis answers and some ready worker has an upstream that is not down, and the reply."""
    serving = [slot.status for slot in view.slots if slot.state == "ready" and slot.status is not None]
    reachable = any(upstream.state in ("up", "unknown") for status in serving for upstream in status.upstreams)
    reasons = []
    if view.redis is None:
        reasons.append("Redis does not answer")
    if not serving:
        reasons.append("no worker is ready")
    elif not reachable:
        reasons.append("no upstream is up")
    if view.stopping:
        reasons.append("the gateway is stopping")
    body = {
        "ready": not reasons,
        "reasons": reasons,
        "logprobs_scale": dict(view.logprobs_scale),
        "warnings": warnings(view),
    }
    return not reasons, body


def warnings(view: View) -> list[str]:
    """Return sentences about what an operator should fix although the gateway runs, and how."""
    raw = [url for url, scales in view.logprobs_scale.items() if scales is False]
    # Each worker finds this out by itself, with its first sample.
    missing = {model: None for status in _statuses(view) for model in status.missing_models}
    lacking = {
        upstream.url: None
        for status in _statuses(view)
        for upstream in status.upstreams
        if upstream.lacks_generate and upstream.state != "leaving"
    }
    return [
        *(f"{url}: {RAW_LOGPROBS}" for url in raw),
        *(f"{url}: {NO_GENERATE}" for url in lacking),
        *(f"--model {model}: {_NO_MODEL}" for model in missing),
    ]


def _statuses(view: View) -> list[Status]:
    return [slot.status for slot in view.slots if slot.status is not None]


def timestamp(wall_s: float) -> str:
    """Write a wall time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
