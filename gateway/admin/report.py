"""`/status` and `/readyz`, from a `View`. Pure; field names are part of the interface."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from gateway.admin.timings import UpstreamTotals
from shared.core.upstream_protocol import NO_GENERATE
from shared.histogram import count, quantile_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.admin.view import SlotView, SpareView, View
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
# What one worker finds is what counts, the better the earlier here.
_STATES: Final = ("up", "unknown", "resting", "leaving")
RAW_LOGPROBS: Final = "sampled logprobs do not heed the temperature; start vLLM with --logprobs-mode processed_logprobs"

_NO_MODEL: Final = "no upstream lists it, and samples of it fail; serve it, or map it by --model NAME=UPSTREAM_NAME"


def status(view: View) -> dict[str, Any]:
    return {
        "gateway": {
            "url": view.url,
            "version": view.version,
            "started_at": timestamp(view.started_at_s),
            "stopping": view.stopping,
            "loop_lag_ms": round(view.loop_lag_ms, 3),
        },
        "workers": [_worker(slot) for slot in view.slots],
        "spare": _spare(view.spare),
        "redis": _redis(view),
        "upstreams": upstreams(view),
        "warnings": warnings(view),
        "samples": {name: int(view.totals.get(name, 0)) for name in _SAMPLE_COUNTERS},
        "counters": {name: int(value) for name, value in sorted(view.totals.items()) if name != "cpu_seconds"},
        "undelivered": undelivered(view.totals),
        "stages_s": {stage: _quantiles(histogram) for stage, histogram in view.last_minute.stages.items()},
        "keys": [asdict(key) for key in view.keys],
        # Every worker meets every session in time, since any request may land anywhere: not a sum.
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


def _spare(spare: SpareView | None) -> dict[str, Any] | None:
    if spare is None:
        return None
    return {"state": spare.state, "pid": spare.pid, "rss_bytes": spare.usage.rss_bytes}


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
    """One entry per URL over all workers: up for one is up, resting for all is resting."""
    by_url: dict[str, list[UpstreamStatus]] = {}
    for status in _statuses(view):
        for upstream in status.upstreams:
            by_url.setdefault(upstream.url, []).append(upstream)
    return [
        {
            "url": url,
            "state": _joint_state(entry.state for entry in entries),
            "in_flight": sum(entry.in_flight for entry in entries),
            "failures": sum(entry.failures for entry in entries),
            "logprobs_scale": view.logprobs_scale.get(url),
            # Workers find it out each for itself, and may do so at different times.
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
    """None where nothing was measured."""
    p50, p99 = (quantile_s(histogram, q) for q in (0.5, 0.99))
    return {"count": count(histogram), "p50": _rounded(p50), "p99": _rounded(p99)}


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None


def undelivered(totals: Mapping[str, float]) -> dict[str, int]:
    """Results and errors that were never handed over, as far as the workers have told, and about how large they are.

    A client that closes its connection as soon as it has read may count as one that has not; its acknowledgement tells.
    """
    settled = totals.get("completed", 0) + totals.get("failed", 0)
    fetched = max(totals.get("delivered", 0), totals.get("acknowledged", 0))
    waiting = max(settled - fetched - totals.get("expired_undelivered", 0), 0)
    mean_bytes = totals.get("result_bytes", 0) / settled if settled else 0
    return {"results": int(waiting), "bytes": int(waiting * mean_bytes)}


def _joint_state(states: Iterable[str]) -> str:
    seen = set(states)
    return next((state for state in _STATES if state in seen), "unknown")


def readiness(view: View) -> tuple[bool, dict[str, Any]]:
    """Ready when Redis answers and a worker serves that has an upstream which is not down."""
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
    """What an operator has to mend though the gateway runs, a sentence each that says how."""
    raw = [url for url, scales in view.logprobs_scale.items() if scales is False]
    # Workers find it out each for itself, and one that has had no sample does not know.
    missing = {model: None for told in _statuses(view) for model in told.missing_models}
    lacking = {one.url: None for told in _statuses(view) for one in told.upstreams if _lacks_generate(one)}
    return [
        *(f"{url}: {RAW_LOGPROBS}" for url in raw),
        *(f"{url}: {NO_GENERATE}" for url in lacking),
        *(f"--model {model}: {_NO_MODEL}" for model in missing),
    ]


def _lacks_generate(upstream: UpstreamStatus) -> bool:
    return upstream.lacks_generate and upstream.state != "leaving"


def _statuses(view: View) -> list[Status]:
    return [slot.status for slot in view.slots if slot.status is not None]


def timestamp(wall_s: float) -> str:
    """RFC 3339, UTC."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
