"""A run's measurements one by one, and what a plot needs of them: counts over time and over latency. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gateway.bench.watch.usage import SHORTEST_LOOK_S

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

# As many columns as a plot on a phone can show apart.
BINS: Final = 60
# Latencies that span more than this many times their least are told on a logarithmic axis.
_WIDE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Series:
    """Times are seconds after the first submission.

    `latency_s`, `submit_s`: float64[n]. `spans_s`: float64[n, 2], submission and result of each good sample.
    `health_s`: float64[n, 2], when healthz was asked and how long it took, or was waited for. `cpu_s`: by whose it is,
    float64[n, 2], when it was looked at and the CPU seconds spent until then.
    """

    seconds: float
    latency_s: Floats
    submit_s: Floats
    spans_s: Floats
    health_s: Floats
    cpu_s: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class BinnedCounts:
    """`edges`: float64[n + 1], rising; `counts`: int64[n]."""

    edges: Floats
    counts: npt.NDArray[np.int64]
    logarithmic: bool


def histogram(values: Floats) -> BinnedCounts | None:
    """None of no values."""
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    logarithmic = low > 0 and high / low > _WIDE
    if high <= low:
        low, high = low * 0.9, high * 1.1 or 1.0
    edges = np.geomspace(low, high, BINS + 1) if logarithmic else np.linspace(low, high, BINS + 1)
    # Rounding must not push the extremes out of their own bins.
    edges[0], edges[-1] = min(low, edges[0]), max(high, edges[-1])
    counts, _ = np.histogram(values, edges)
    return BinnedCounts(edges, counts, logarithmic)


def time_edges(series: Series) -> Floats:
    """float64[BINS + 1], over the whole run."""
    return np.linspace(0.0, max(series.seconds, 1e-3), BINS + 1)


def rates(series: Series) -> Floats:
    """float64[BINS]: results per second in each bin of `time_edges`."""
    edges = time_edges(series)
    counts, _ = np.histogram(series.spans_s[:, 1], edges)
    return counts / np.diff(edges)


def in_flight(series: Series) -> Floats:
    """float64[BINS + 1]: samples that were submitted and had no result yet, at each of `time_edges`.

    Samples that never had a good result are in no span, and so not in it.
    """
    edges = time_edges(series)
    begun = np.searchsorted(np.sort(series.spans_s[:, 0]), edges, side="right")
    ended = np.searchsorted(np.sort(series.spans_s[:, 1]), edges, side="right")
    return (begun - ended).astype(np.float64)


def cores(spent_s: Floats) -> list[tuple[float, float]]:
    """Of float64[n, 2] as in `Series.cpu_s`: between each two looks, the middle and how many cores were in use."""
    passed_s, used_s = np.diff(spent_s, axis=0).T
    long_enough = passed_s >= SHORTEST_LOOK_S
    middles = (spent_s[1:, 0] + spent_s[:-1, 0]) / 2
    return list(zip(middles[long_enough].tolist(), (used_s / passed_s)[long_enough].tolist(), strict=True))
