"""How long samples take in each stage and at each upstream, over all workers including those that ended.

Kept twice: since the start, for Prometheus, and for the last minute, so that `/status` shows what is slow now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Final

from shared.histogram import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shared.channel import Status

    Key = tuple[str, str]  # the kind of vector, and the upstream's URL or ""
    Vectors = Mapping[Key, Sequence[float]]

_SNAPSHOT_EVERY_S: Final = 5.0
_WINDOW: Final = 12
_NOTHING: Final = (0.0,) * FIELDS
# The order in which a sample passes through them.
STAGES: Final = ("accept", "queue", "upstream", "store", "delivery")


@dataclass(frozen=True, slots=True)
class UpstreamTotals:
    """Counts of one upstream; `queue` and `latency` are histograms of `shared/histogram.py`."""

    attempts: int = 0
    faults: int = 0
    wasted_ms: int = 0
    queue: Sequence[float] = _NOTHING
    latency: Sequence[float] = _NOTHING


@dataclass(frozen=True, slots=True)
class Timings:
    """A histogram for each of `STAGES`, and the totals of each upstream by URL."""

    stages: Mapping[str, Sequence[float]] = field(default_factory=lambda: dict.fromkeys(STAGES, _NOTHING))
    upstreams: Mapping[str, UpstreamTotals] = field(default_factory=dict)


class TimingLedger:
    """Sums over processes, each of which counts from its own start. No sum ever falls."""

    def __init__(self) -> None:
        self._totals: dict[Key, tuple[float, ...]] = {}
        self._last: dict[int, dict[Key, Sequence[float]]] = {}
        self._snapshots: deque[dict[Key, tuple[float, ...]]] = deque(maxlen=_WINDOW)
        self._snapshot_at_s = float("-inf")

    def update(self, serial: int, status: Status) -> None:
        last = self._last.setdefault(serial, {})
        for key, vector in _vectors(status):
            before = last.get(key, ())
            if vector != before:
                self._totals[key] = _grown(self._totals.get(key, ()), vector, before)
                last[key] = vector

    def forget(self, serial: int) -> None:
        """Drop a process that has ended; its share of the sums stays."""
        self._last.pop(serial, None)

    def tick(self, now_s: float) -> None:
        if now_s - self._snapshot_at_s >= _SNAPSHOT_EVERY_S:
            self._snapshots.append(dict(self._totals))
            self._snapshot_at_s = now_s

    def since_start(self) -> Timings:
        return _timings(self._totals)

    def last_minute(self) -> Timings:
        oldest = self._snapshots[0] if self._snapshots else {}
        return _timings({key: _grown((), vector, oldest.get(key, ())) for key, vector in self._totals.items()})


def _vectors(status: Status) -> Iterable[tuple[Key, Sequence[float]]]:
    for name, histogram in status.stages.items():
        yield (name, ""), histogram
    for upstream in status.upstreams:
        yield ("queue", upstream.url), upstream.queue
        yield ("upstream", upstream.url), upstream.latency
        yield ("counts", upstream.url), (upstream.attempts, upstream.faults, upstream.wasted_ms)


def _grown(total: Sequence[float], vector: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """Add to `total` by how much `vector` grew over `before`; shorter sequences are padded with zeros."""
    rows = zip(_padded(total, vector), vector, _padded(before, vector), strict=False)
    # Runs for each histogram of each worker once a second, so it makes no call per number.
    return tuple([added + (now - then if now > then else 0) for added, now, then in rows])


def _padded(values: Sequence[float], like: Sequence[float]) -> Sequence[float]:
    missing = len(like) - len(values)
    return (*values, *repeat(0, missing)) if missing > 0 else values


def _timings(totals: Vectors) -> Timings:
    stages: dict[str, list[Sequence[float]]] = {stage: [_NOTHING] for stage in STAGES}
    for (what, _), vector in totals.items():
        if what in stages and vector:
            stages[what].append(vector)
    return Timings(
        {stage: tuple(map(sum, zip(*vectors, strict=True))) for stage, vectors in stages.items()},
        {url: _upstream(totals, url) for what, url in totals if what == "counts"},
    )


def _upstream(totals: Vectors, url: str) -> UpstreamTotals:
    attempts, faults, wasted_ms = map(int, totals["counts", url])
    queue, latency = totals.get(("queue", url)), totals.get(("upstream", url))
    return UpstreamTotals(attempts, faults, wasted_ms, queue or _NOTHING, latency or _NOTHING)
