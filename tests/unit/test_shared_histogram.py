from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.histogram import BOUNDS_S, FIELDS, Histogram, count, quantile_s


def of(*seconds: float) -> tuple[float, ...]:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    return histogram.snapshot()


def test_bounds_hold_a_generation_of_the_longest_read_timeout() -> None:
    assert BOUNDS_S[0] == 0.0005
    assert BOUNDS_S[-1] > 2048
    assert len(of()) == FIELDS == len(BOUNDS_S) + 2


@given(st.floats(0, 1e6))
def test_falls_into_the_bucket_whose_bound_is_the_next(seconds: float) -> None:
    snapshot = of(seconds)
    bucket = snapshot[:-1].index(1)
    assert bucket == len(BOUNDS_S) or seconds <= BOUNDS_S[bucket]
    assert bucket == 0 or seconds >= BOUNDS_S[bucket - 1] * (1 - 1e-9)
    assert snapshot[-1] == pytest.approx(seconds, abs=1e-6)


def test_what_lasts_for_ever_is_counted_above_the_last_bound() -> None:
    snapshot = of(1.0, 86_400.0)
    assert snapshot[len(BOUNDS_S)] == 1
    assert count(snapshot) == 2
    assert quantile_s(snapshot, 1.0) == BOUNDS_S[-1]


def test_no_quantile_of_nothing() -> None:
    assert quantile_s(of(), 0.5) is None


@given(st.lists(st.floats(0.001, 2000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_right_within_a_factor_of_two(values: list[float], q: float) -> None:
    exact = sorted(values)[max(0, -(-round(q * len(values) * 1e6) // 10**6) - 1)]
    told = quantile_s(of(*values), q)
    assert told is not None
    assert exact / 2.001 <= told <= exact * 2.001
