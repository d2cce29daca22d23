from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.histogram import BOUNDS_S, FIELDS, PER_DOUBLING, Histogram, count, quantile_s


def of(*seconds: float) -> tuple[float, ...]:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    return histogram.snapshot()


def test_bounds_hold_a_generation_of_the_longest_read_timeout() -> None:
    assert BOUNDS_S[0] == 0.0005
    assert BOUNDS_S[-1] > 2048
    assert len(of()) == FIELDS == len(BOUNDS_S) + 2


def test_a_few_bounds_double_from_the_first() -> None:
    """Those are the ones in `/metrics`, whose names dashboards of others hold."""
    doubling = BOUNDS_S[::PER_DOUBLING]
    assert doubling == tuple(0.0005 * 2**i for i in range(23))
    assert doubling[-1] == BOUNDS_S[-1]


@given(st.floats(0, 1e6) | st.sampled_from(BOUNDS_S))
def test_falls_into_the_bucket_whose_bound_is_the_next(seconds: float) -> None:
    snapshot = of(seconds)
    bucket = snapshot[:-1].index(1)
    assert bucket == len(BOUNDS_S) or seconds <= BOUNDS_S[bucket]
    assert bucket == 0 or seconds > BOUNDS_S[bucket - 1]
    assert snapshot[-1] == pytest.approx(seconds, abs=1e-6)


@given(st.lists(st.lists(st.floats(0, 1e4), max_size=5), min_size=1, max_size=10))
def test_looking_often_finds_the_same_as_looking_once(batches: list[list[float]]) -> None:
    often = Histogram()
    for batch in batches:
        for value in batch:
            often.add(value)
        snapshot = often.snapshot()
        assert often.snapshot() == snapshot, "nothing was added between"
    *counts, seconds = of(*(value for batch in batches for value in batch))
    assert list(snapshot[:-1]) == counts
    assert snapshot[-1] == pytest.approx(seconds, abs=1e-5)


def test_what_lasts_for_ever_is_counted_above_the_last_bound() -> None:
    snapshot = of(1.0, 86_400.0)
    assert snapshot[len(BOUNDS_S)] == 1
    assert count(snapshot) == 2
    assert quantile_s(snapshot, 1.0) == BOUNDS_S[-1]


def test_no_quantile_of_nothing() -> None:
    assert quantile_s(of(), 0.5) is None


def exact_quantile_s(values: list[float], q: float) -> float:
    """The smallest value that a share `q` of all does not exceed."""
    return next(value for i, value in enumerate(sorted(values)) if i + 1 >= q * len(values))


@given(st.lists(st.floats(BOUNDS_S[0], 2000, exclude_min=True), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_right_to_a_fifth(values: list[float], q: float) -> None:
    found, exact = quantile_s(of(*values), q), exact_quantile_s(values, q)
    assert found is not None
    assert exact / 1.2 <= found <= exact * 1.2


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=100), st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_a_higher_quantile_is_no_less(values: list[float], qs: list[float]) -> None:
    snapshot = of(*values)
    quantiles = [quantile_s(snapshot, q) or 0.0 for q in sorted(qs)]
    assert quantiles == sorted(quantiles)


@pytest.mark.parametrize("seconds", [0.2, 0.73, 1.0, 1.03, 60.0])
def test_what_always_takes_the_same_is_told_so(seconds: float) -> None:
    snapshot = of(*[seconds] * 1000)
    assert quantile_s(snapshot, 0.5) == pytest.approx(seconds, rel=0.1)
    assert quantile_s(snapshot, 0.99) == pytest.approx(seconds, rel=0.2)
