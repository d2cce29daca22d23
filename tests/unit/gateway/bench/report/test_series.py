"""Counts over time and over latency."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.bench.report.series import BINS, Series, cores, histogram, in_flight, rates, time_edges
from gateway.bench.watch import usage


def measured(*spans_s: tuple[float, float], seconds: float = 6.0) -> Series:
    empty = np.empty(0)
    return Series(seconds, empty, empty, np.array(spans_s, float).reshape(-1, 2), np.empty((0, 2)), {})


def test_every_value_is_in_a_bin_whatever_the_axis() -> None:
    for values in (np.array([1.0, 1.5, 2.0]), np.array([0.001, 0.1, 10.0]), np.array([3.0]), np.array([0.0, 0.0])):
        counted = histogram(values)
        assert counted is not None
        assert counted.counts.sum() == values.size
        assert len(counted.edges) == BINS + 1 == len(counted.counts) + 1
        assert (np.diff(counted.edges) > 0).all()


def test_a_wide_spread_is_told_on_a_logarithmic_axis_and_none_with_a_zero() -> None:
    kinds = [histogram(np.array(values)) for values in ([1.0, 19.0], [1.0, 21.0], [0.0, 21.0])]
    assert [kind is not None and kind.logarithmic for kind in kinds] == [False, True, False]


def test_nothing_measured_has_no_distribution() -> None:
    assert histogram(np.empty(0)) is None


def test_results_per_second_add_up_to_the_results() -> None:
    run = measured((0.0, 0.5), (0.0, 3.0), (1.0, 6.0))
    assert (rates(run) * np.diff(time_edges(run))).sum() == pytest.approx(3)


def test_in_flight_is_what_was_begun_and_has_not_ended() -> None:
    run = measured((0.0, 2.05), (1.0, 4.0), (1.0, 6.0))
    counted = dict(zip(np.round(time_edges(run), 3).tolist(), in_flight(run).tolist(), strict=True))
    assert [counted[at] for at in (0.0, 0.9, 1.0, 2.1, 4.0, 6.0)] == [1, 1, 3, 2, 1, 0]


def test_a_run_without_results_has_an_empty_course() -> None:
    assert in_flight(measured()).tolist() == [0.0] * (BINS + 1)
    assert rates(measured()).tolist() == [0.0] * BINS


def test_cores_in_use_are_told_between_two_looks_that_are_apart() -> None:
    spent_s = np.array([(0.0, 0.0), (1.0, 0.5), (1.01, 0.6), (3.01, 2.6)])
    assert cores(spent_s) == [(0.5, 0.5), (pytest.approx(2.01), pytest.approx(1.0))]
    assert cores(spent_s[:1]) == []
    assert usage.SHORTEST_LOOK_S > 0.01
