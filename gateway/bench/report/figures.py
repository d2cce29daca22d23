"""The plots of a run, and of several: which measurement goes on which axis. Pure."""

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
    """`keys`: (class, words) of each line, where there are several."""

    title: str
    svg: str
    keys: tuple[tuple[str, str], ...] = ()


# Classes of lines in page.css.
_KINDS: Final = ("s1", "s2", "s3", "s4")
_FIRST, _SECOND = _KINDS[:2]


def of_run(run: Run) -> list[Figure]:
    """What could not be measured has no figure."""
    report, measured = run.report, run.series
    marks = event_marks(report.chaos)
    figures = [
        _distribution("Latency: call to checked result", measured.latency_s, report.latency_s),
        _distribution("Submit latency: post to promise", measured.submit_s, report.submit_latency_s),
        _over_time("Results per second", measured, _between(series.rates(measured)), marks),
        _over_time("Samples in flight", measured, series.in_flight(measured).tolist(), marks),
        _health(measured, marks),
        _cores(measured, marks),
    ]
    return [figure for figure in figures if figure is not None]


def of_several(reports: Sequence[Report]) -> list[Figure]:
    """CPU and rate over the samples in flight; none of fewer than two different numbers of these."""
    ordered = sorted(reports, key=_concurrency)
    if len({_concurrency(report) for report in ordered}) < 2:
        return []
    workers = [(_concurrency(report), report.gateway.cpu_ms_per_sample) for report in ordered]
    redis = [(_concurrency(report), _redis_ms(report)) for report in ordered]
    rates = [(_concurrency(report), report.samples_per_second) for report in ordered]
    keys = ((_FIRST, "gateway workers"), (_SECOND, "Redis"))
    return [
        *_over_in_flight("CPU per sample, ms, over samples in flight", [workers, redis], keys),
        *_over_in_flight("Results per second over samples in flight", [rates], ()),
    ]


def event_marks(events: Sequence[ChaosEvent]) -> list[Mark]:
    """Numbered in order of time; the words are told beside the plots."""
    return [Mark(event.at_s, str(number), "event", event_words(event)) for number, event in enumerate(events, 1)]


def event_words(event: ChaosEvent) -> str:
    back = f"served again after {told_s(event.recovered_after_s)}" if event.recovered_after_s is not None else ""
    return f"{event.what} at {told_s(event.at_s)}, {back or 'not seen to serve again'}"


def told_s(seconds: float) -> str:
    """For an axis: short, in the unit that suits."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 600 else f"{seconds:.0f} s"


def told_count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _distribution(title: str, values: Floats, quantiles: Quantiles | None) -> Figure | None:
    counted = series.histogram(values)
    if counted is None or quantiles is None:
        return None
    edges, counts = counted.edges.tolist(), counted.counts.tolist()
    x = Axis(edges[0], edges[-1], told_s, counted.logarithmic)
    y = Axis(0.0, plot.round_up(max(counts)), told_count)
    marks = [
        Mark(value, f"{name} {told_s(value)}", "quantile")
        for name, value in (("p50", quantiles.p50), ("p90", quantiles.p90), ("p99", quantiles.p99))
    ]
    return Figure(title, plot.bars(title, x, y, edges, counts, marks))


def _over_time(title: str, measured: Series, values: Sequence[float], marks: Sequence[Mark]) -> Figure:
    edges = series.time_edges(measured).tolist()
    x, y = _time_axis(edges), Axis(0.0, plot.round_up(max(values)), told_count)
    notes = [
        (begin, end, f"{told_s(begin)} to {told_s(end)}: {told_count(value)}")
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
    y = _wide_axis(measured.health_s[:, 1])
    lines = [Curve(_middles(edges, slowest), _SECOND), Curve(_middles(edges, medians), _FIRST)]
    notes = [
        (begin, end, f"{told_s(begin)} to {told_s(end)}: median {told_s(median)}, slowest {told_s(worst)}")
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
    y = Axis(0.0, plot.round_up(max(value for _, points in used for _, value in points)), told_count)
    lines = [Curve(points, kind) for kind, (_, points) in zip(_KINDS, used, strict=False)]
    edges = series.time_edges(measured).tolist()
    return Figure(title, plot.lines(title, _time_axis(edges), y, lines, marks), keys)


def _over_in_flight(
    title: str, rows: Sequence[Sequence[tuple[float, Reading]]], keys: tuple[tuple[str, str], ...]
) -> Iterator[Figure]:
    """One figure, or none where nothing was measured."""
    values = [value for row in rows for _, value in row if value is not None]
    if not values:
        return
    counts = [count for count, _ in rows[0]]
    # Half a step of ground on both sides: the points are what is looked at, and none lies on an axis.
    x = Axis(counts[0] / 1.3, counts[-1] * 1.3, told_count, logarithmic=True)
    y = Axis(0.0, plot.round_up(max(values)), lambda value: f"{value:,.3g}")
    lines = [Curve(row, kind, dotted=True) for row, kind in zip(rows, (_FIRST, _SECOND), strict=False)]
    yield Figure(title, plot.lines(title, x, y, lines), keys)


def _time_axis(edges: Sequence[float]) -> Axis:
    return Axis(edges[0], edges[-1], told_s)


def _wide_axis(values: Floats) -> Axis:
    low, high = max(float(values.min()), 1e-4), float(values.max())
    return Axis(low / 1.5, max(high, low) * 1.5, told_s, logarithmic=True)


def _middles(edges: Floats, values: Sequence[Reading]) -> list[tuple[float, Reading]]:
    """Of bins without a value nothing: a probe that waited through them is drawn where it began."""
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return [(middle, value) for middle, value in zip(middles, values, strict=True) if value is not None]


def _between(rates: Floats) -> list[float]:
    """A rate at each edge: that of the bin before it; the run begins with none."""
    return [0.0, *rates.tolist()]


def _concurrency(report: Report) -> int:
    return int(report.config["concurrency"])


def _redis_ms(report: Report) -> float | None:
    cpu, completed = report.redis.cpu_seconds, report.samples.completed
    return None if cpu is None or not completed else cpu * 1e3 / completed
