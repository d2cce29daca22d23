"""The single measurements of a run, and the counts over time and over latency that plots need. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gateway.bench.watch.usage import SHORTEST_LOOK_S

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

# As many columns as can be distinguished on a phone.
BINS: Final = 60
# If the largest latency is more than this many times the smallest, the axis is logarithmic.
_WIDE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements whose times are seconds after the first submission.

    `latency_s` and `submit_s` are float64[n]. The others are float64[n, 2]: `spans_s`, submission and result of each
    completed sample; `health_s`, when healthz was probed and how long the answer took (or the watch waited); `cpu_s`,
    by group of processes, the time of each look and the CPU seconds spent until then.
    """

    seconds: float
    latency_s: Floats
    submit_s: Floats
    spans_s: Floats
    health_s: Floats
    cpu_s: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class BinnedCounts:
    """A histogram: `edges` is float64[n + 1], rising; `counts` is int64[n]."""

    edges: Floats
    counts: npt.NDArray[np.int64]
    logarithmic: bool


def histogram(values: Floats) -> BinnedCounts | None:
    """Count the values in `BINS` bins, or return None if there are none."""
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    logarithmic = low > 0 and high / low > _WIDE
    if high <= low:
        low, high = low * 0.9, high * 1.1 or 1.0
    edges = np.geomspace(low, high, BINS + 1) if logarithmic else np.linspace(low, high, BINS + 1)
    # Rounding must not push the extreme values out of the outer bins.
    edges[0], edges[-1] = min(low, edges[0]), max(high, edges[-1])
    counts, _ = np.histogram(values, edges)
    return BinnedCounts(edges, counts, logarithmic)


def time_edges(series: Series) -> Floats:
    """Return float64[BINS + 1], spread evenly over the run."""
    return np.linspace(0.0, max(series.seconds, 1e-3), BINS + 1)


def rates(series: Series) -> Floats:
    """Return float64[BINS]: results per second in each bin of `time_edges`."""
    edges = time_edges(series)
    counts, _ = np.histogram(series.spans_s[:, 1], edges)
    return counts / np.diff(edges)


def in_flight(series: Series) -> Floats:
    """Return float64[BINS + 1]: samples submitted and without a result at each of `time_edges`.

    Samples that never completed have no span, so they are not counted.
    """
    edges = time_edges(series)
    begun = np.searchsorted(np.sort(series.spans_s[:, 0]), edges, side="right")
    ended = np.searchsorted(np.sort(series.spans_s[:, 1]), edges, side="right")
    return (begun - ended).astype(np.float64)


def cores(spent_s: Floats) -> list[tuple[float, float]]:
    """Return (middle, cores in use) for each two successive looks of a float64[n, 2] of `Series.cpu_s`."""
    passed_s, used_s = np.diff(spent_s, axis=0).T
    long_enough = passed_s >= SHORTEST_LOOK_S
    middles = (spent_s[1:, 0] + spent_s[:-1, 0]) / 2
    return list(zip(middles[long_enough].tolist(), (used_s / passed_s)[long_enough].tolist(), strict=True))
