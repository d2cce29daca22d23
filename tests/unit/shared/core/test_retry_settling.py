"""What the store does not take: what waits, what fails, what is given up."""

from __future__ import annotations

import pytest

from shared.core.lifecycle import State
from shared.core.model import Category
from shared.core.retry import REFUSALS_MOST, Next, after_refusal, may_never_fit, never_fits

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("result", "limit", "fits"),
    [(1, 0, True), (10**9, 0, True), (75, 100, True), (76, 100, False), (100, 100, False), (300, 100, False)],
)
def test_a_result_that_leaves_the_store_no_room_never_fits(result: int, limit: int, fits: bool) -> None:
    """C5"""
    failure = never_fits(result * MIB, limit * MIB)
    assert (failure is None) == fits
    if failure is not None:
        assert failure.category is Category.SERVER
        assert f"{result}.0 MiB" in failure.message
        assert f"{limit}.0 MiB" in failure.message


def test_small_results_are_not_asked_about() -> None:
    assert not may_never_fit(64 * 1024)
    assert may_never_fit(MIB)


@pytest.mark.parametrize("state", [State.READY, State.FAILED, State.CANCELLED, State.STALE, State.ORPHANED])
def test_refusals_are_bounded(state: State) -> None:
    assert after_refusal(state, REFUSALS_MOST - 1) is Next.AGAIN
    assert after_refusal(state, REFUSALS_MOST) is (Next.FAIL if state is State.READY else Next.GIVE_UP)
