"""The sums of what workers tell about time: over processes that come and go, since the start and of the last minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.timings import STAGES, TimingLedger
from shared.counters import Counters
from shared.histogram import count
from tests.gateway_views import histogram, worker_status


def test_a_stage_of_upstreams_is_the_sum_over_them() -> None:
    ledger = TimingLedger()
    ledger.update(1, worker_status("up", "up"))
    since_start = ledger.since_start()
    assert tuple(since_start.stages) == STAGES
    assert count(since_start.stages["upstream"]) == 4
    assert since_start.stages["upstream"][-1] == 8.0
    assert {url: totals.attempts for url, totals in since_start.upstreams.items()} == {"http://u0": 3, "http://u1": 3}


def test_a_replaced_worker_takes_nothing_away() -> None:
    """E2"""
    ledger = TimingLedger()
    for serial in (1, 2):
        ledger.update(serial, worker_status("up"))
        ledger.update(serial, worker_status("up"))  # said again: nothing happened meanwhile
        ledger.forget(serial)
    totals = ledger.since_start().upstreams["http://u0"]
    assert (totals.attempts, totals.faults, totals.wasted_ms) == (6, 2, 3000)
    assert count(totals.latency) == 4


def test_the_last_minute_forgets_what_is_older() -> None:
    ledger = TimingLedger()
    ledger.update(1, worker_status("up"))
    assert count(ledger.last_minute().upstreams["http://u0"].latency) == 2
    for now_s in range(0, 65, 5):
        ledger.tick(float(now_s))
    assert count(ledger.last_minute().upstreams["http://u0"].latency) == 0
    ledger.update(2, worker_status("up"))
    assert count(ledger.last_minute().upstreams["http://u0"].latency) == 2
    assert count(ledger.since_start().upstreams["http://u0"].latency) == 4


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.floats(0, 10), max_size=3), st.booleans()), max_size=20))
def test_no_sum_ever_falls(steps: list[tuple[int, list[float], bool]]) -> None:
    """E2: not for processes that come and go, nor for one that tells less than before."""
    ledger = TimingLedger()
    before = ledger.since_start().stages["store"]
    for serial, seconds, dies in steps:
        stages = {**Counters().stages.snapshot(), "store": histogram(*seconds)}
        ledger.update(serial, worker_status(stages=stages))
        if dies:
            ledger.forget(serial)
        after = ledger.since_start().stages["store"]
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
