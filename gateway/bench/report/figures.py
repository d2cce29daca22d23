"""Choose the plots of one run and of several: which measurement goes on which axis. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from gateway.bench.report import plot, series
from gateway.bench.report.plot import Axis, Curve, Mark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.bench.report.outcome import Run
    from gateway.bench.report.report import ChaosEvent, Quantiles, Report
    from gateway.bench.report.series import Floats, Series

    Reading = float | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot. `keys` holds (CSS class, label) for each curve if there are several."""

    title: str
    svg: str
    keys: tuple[tuple[str, str], ...] = ()


# CSS classes of curves in page.css.
_KINDS: Final = ("s1", "s2", "s3", "s4")
_FIRST, _SECOND = _KINDS[:2]


def of_run(run: Run) -> list[Figure]:
    """Return the plots of one run; a measurement that is missing has none."""
    report, measured = run.report, run.series
    # Faults are numbered in order of time; the list beside the plots describes them.
    marks = [Mark(event.at_s, str(number), "event", event_text(event)) for number, event in enumerate(report.chaos, 1)]
    figures = [
        _distribution("Latency: call to checked result", measured.latency_s, report.latency_s),
        _distribution("Submit latency: post to promise", measured.submit_s, report.submit_latency_s),
        # A curve has a value at each edge, a rate belongs to the bin before it; the run begins with none.
        _over_time("Results per second", measured, [0.0, *series.rates(measured).tolist()], marks),
        _over_time("Samples in flight", measured, series.in_flight(measured).tolist(), marks),
        _health(measured, marks),
        _cores(measured, marks),
    ]
    return [figure for figure in figures if figure is not None]


def of_several(reports: Sequence[Report]) -> list[Figure]:
    """Return CPU and rate over the samples in flight, if the runs differ in that number."""
    ordered = sorted(((int(report.config["concurrency"]), report) for report in reports), key=lambda pair: pair[0])
    if len({in_flight for in_flight, _ in ordered}) < 2:
        return []
    workers = [(in_flight, report.gateway.cpu_ms_per_sample) for in_flight, report in ordered]
    redis = [(in_flight, _redis_ms(report)) for in_flight, report in ordered]
    rates = [(in_flight, report.samples_per_second) for in_flight, report in ordered]
    keys = ((_FIRST, "gateway workers"), (_SECOND, "Redis"))
    return [
        *_over_in_flight("CPU per sample, ms, over samples in flight", [workers, redis], keys),
        *_over_in_flight("Results per second over samples in flight", [rates], ()),
    ]


def event_text(event: ChaosEvent) -> str:
    back = f"served again after {format_s(event.recovered_after_s)}" if event.recovered_after_s is not None else ""
    return f"{event.what} at {format_s(event.at_s)}, {back or 'did not serve again before the end'}"


def format_s(seconds: float) -> str:
    """Format a duration for an axis: short, in a fitting unit."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 600 else f"{seconds:.0f} s"


def format_count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _distribution(title: str, values: Floats, quantiles: Quantiles | None) -> Figure | None:
    counted = series.histogram(values)
    if counted is None or quantiles is None:
        return None
    edges, counts = counted.edges.tolist(), counted.counts.tolist()
    x = Axis(edges[0], edges[-1], format_s, counted.logarithmic)
    y = Axis(0.0, plot.round_up(max(counts)), format_count)
    marks = [
        Mark(value, f"{name} {format_s(value)}", "quantile")
        for name, value in (("p50", quantiles.p50), ("p90", quantiles.p90), ("p99", quantiles.p99))
    ]
    return Figure(title, plot.bars(title, x, y, edges, counts, marks))


def _over_time(title: str, measured: Series, values: Sequence[float], marks: Sequence[Mark]) -> Figure:
    edges = series.time_edges(measured).tolist()
    x, y = _time_axis(edges), Axis(0.0, plot.round_up(max(values)), format_count)
    notes = [
        (begin, end, f"{format_s(begin)} to {format_s(end)}: {format_count(value)}")
        for (begin, end), value in zip(pairwise(edges), values[1:], strict=True)
    ]
    line = Curve(list(zip(edges, values, strict=True)), _FIRST, filled=True)
    return Figure(title, plot.lines(title, x, y, [line], marks, notes))


def _health(measured: Series, marks: Sequence[Mark]) -> Figure | None:
    if not measured.health_s.size:
        return None
    edges = series.time_edges(measured)
    medians, slowest = [], []
    for begin, end in pairwise(edges.tolist()):
        at_s, took_s = measured.health_s.T
        within = took_s[(at_s >= begin) & (at_s < end)]
        medians.append(float(np.median(within)) if within.size else None)
        slowest.append(float(within.max()) if within.size else None)
    title, keys = "healthz", ((_FIRST, "median"), (_SECOND, "slowest"))
    low, high = max(float(measured.health_s[:, 1].min()), 1e-4), float(measured.health_s[:, 1].max())
    y = Axis(low / 1.5, max(high, low) * 1.5, format_s, logarithmic=True)
    lines = [Curve(_middles(edges, slowest), _SECOND), Curve(_middles(edges, medians), _FIRST)]
    notes = [
        (begin, end, f"{format_s(begin)} to {format_s(end)}: median {format_s(median)}, slowest {format_s(worst)}")
        for (begin, end), median, worst in zip(pairwise(edges.tolist()), medians, slowest, strict=True)
        if median is not None and worst is not None
    ]
    return Figure(title, plot.lines(title, _time_axis(edges.tolist()), y, lines, marks, notes), keys)


def _cores(measured: Series, marks: Sequence[Mark]) -> Figure | None:
    used = [(whose, points) for whose, spent_s in measured.cpu_s.items() if (points := series.cores(spent_s))]
    if not used:
        return None
    title = "Cores in use"
    keys = tuple((kind, whose) for kind, (whose, _) in zip(_KINDS, used, strict=False))
    y = Axis(0.0, plot.round_up(max(value for _, points in used for _, value in points)), format_count)
    lines = [Curve(points, kind) for kind, (_, points) in zip(_KINDS, used, strict=False)]
    edges = series.time_edges(measured).tolist()
    return Figure(title, plot.lines(title, _time_axis(edges), y, lines, marks), keys)


def _over_in_flight(
    title: str, rows: Sequence[Sequence[tuple[float, Reading]]], keys: tuple[tuple[str, str], ...]
) -> Iterator[Figure]:
    """Yield one figure, or none if nothing was measured."""
    values = [value for row in rows for _, value in row if value is not None]
    if not values:
        return
    counts = [count for count, _ in rows[0]]
    # Some space on both sides, so that no point lies on an axis.
    x = Axis(counts[0] / 1.3, counts[-1] * 1.3, format_count, logarithmic=True)
    y = Axis(0.0, plot.round_up(max(values)), lambda value: f"{value:,.3g}")
    lines = [Curve(row, kind, dotted=True) for row, kind in zip(rows, (_FIRST, _SECOND), strict=False)]
    yield Figure(title, plot.lines(title, x, y, lines), keys)


def _time_axis(edges: Sequence[float]) -> Axis:
    return Axis(edges[0], edges[-1], format_s)


def _middles(edges: Floats, values: Sequence[Reading]) -> list[tuple[float, Reading]]:
    """Pair each value with the middle of its bin; a bin without a value is left out.

    A slow probe leaves the bins empty through which it waited; it counts in the bin in which it began.
    """
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return [(middle, value) for middle, value in zip(middles, values, strict=True) if value is not None]


def _redis_ms(report: Report) -> float | None:
    cpu, completed = report.redis.cpu_seconds, report.samples.completed
    return None if cpu is None or not completed else cpu * 1e3 / completed
