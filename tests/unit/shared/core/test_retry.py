from __future__ import annotations

from dataclasses import replace

import pytest

from shared.core.faults import Fault, FaultClass
from shared.core.model import Category, Failure
from shared.core.retry import MAX_ABORTS, Budget, Fail, Orphan, Policy, Wait, decide

POLICY = Policy(max_reexecutions=1, retry_ambiguous=False, upstream_wait_s=100.0)


def fault(kind: FaultClass, retry_after_s: float | None = None) -> Fault:
    return Fault(kind, "words", retry_after_s=retry_after_s)


def waits_until_the_end(kind: FaultClass, policy: Policy) -> tuple[int, Fail | Orphan]:
    """How many more attempts a sample gets that meets nothing but `kind`, and its end."""
    budget, now_s = Budget(), 0.0
    for waits in range(10_000):
        decision = decide(fault(kind), budget, policy, now_s, 0.5)
        if not isinstance(decision, Wait):
            return waits, decision
        budget, now_s = decision.budget, now_s + decision.delay_s
    raise AssertionError("never ends")


@pytest.mark.parametrize(
    ("kind", "policy", "attempts", "end"),
    [
        (FaultClass.REFUSED, POLICY, 0, Fail),
        (FaultClass.AMBIGUOUS, POLICY, 0, Fail),
        (FaultClass.WRONG_REPLY, POLICY, 1, Fail),
        (FaultClass.WRONG_REPLY, replace(POLICY, max_reexecutions=0), 0, Fail),
        (FaultClass.AMBIGUOUS, replace(POLICY, retry_ambiguous=True), 1, Fail),
        (FaultClass.AMBIGUOUS, replace(POLICY, retry_ambiguous=True, max_reexecutions=3), 3, Fail),
        (FaultClass.INTERRUPTED, POLICY, 1, Orphan),
        (FaultClass.INTERRUPTED, replace(POLICY, max_reexecutions=0), 0, Orphan),
        (FaultClass.INTERRUPTED, replace(POLICY, max_reexecutions=3), 3, Orphan),
        (FaultClass.ABORTED, POLICY, MAX_ABORTS, Orphan),
    ],
)
def test_table(kind: FaultClass, policy: Policy, attempts: int, end: type[Fail | Orphan]) -> None:
    """D9, D17: an abort is tried again 16 times, and is not counted as an interruption."""
    found, decision = waits_until_the_end(kind, policy)
    assert (found, type(decision)) == (attempts, end)


def test_never_executed_waits_as_long_as_the_operator_allows() -> None:
    """D8"""
    waits, end = waits_until_the_end(FaultClass.NEVER_EXECUTED, POLICY)
    assert waits > 10
    assert isinstance(end, Fail)
    assert end.failure.category is Category.SERVER
    assert "100 s" in end.failure.message and "words" in end.failure.message


def test_last_try_falls_on_the_deadline() -> None:
    budget = Budget(waiting_since_s=0.0, tries=20)
    decision = decide(fault(FaultClass.NEVER_EXECUTED, retry_after_s=600.0), budget, POLICY, 99.0, 0.5)
    assert isinstance(decision, Wait) and decision.delay_s == 1.0
    assert isinstance(decide(fault(FaultClass.NEVER_EXECUTED), budget, POLICY, 100.0, 0.5), Fail)


def test_a_fault_may_be_worth_less_waiting_than_others() -> None:
    missing = replace(fault(FaultClass.NEVER_EXECUTED), wait_s=10.0)
    first = decide(missing, Budget(), POLICY, 0.0, 0.5)
    assert isinstance(first, Wait)
    last = decide(missing, replace(first.budget, tries=20), POLICY, 9.0, 0.5)
    assert isinstance(last, Wait) and last.delay_s == 1.0
    end = decide(missing, last.budget, POLICY, 10.0, 0.5)
    assert isinstance(end, Fail)
    assert "10 s" in end.failure.message


def test_waiting_for_a_server_is_not_charged_to_waiting_for_what_it_lacks() -> None:
    """It was restarted for a minute, and then needs its adapters again."""
    missing = replace(fault(FaultClass.NEVER_EXECUTED), wait_s=10.0)
    refused = decide(fault(FaultClass.NEVER_EXECUTED), Budget(), POLICY, 0.0, 0.5)
    assert isinstance(refused, Wait)
    lacks = decide(missing, refused.budget, POLICY, 60.0, 0.5)
    assert isinstance(lacks, Wait)
    refused = decide(fault(FaultClass.NEVER_EXECUTED), lacks.budget, POLICY, 65.0, 0.5)
    assert isinstance(refused, Wait) and refused.budget.bounded_since_s is None
    assert isinstance(decide(missing, refused.budget, POLICY, 75.0, 0.5), Wait)
    end = decide(missing, lacks.budget, POLICY, 100.0, 0.5)
    assert isinstance(end, Fail)


@pytest.mark.parametrize("kind", [FaultClass.INTERRUPTED, FaultClass.ABORTED])
def test_an_execution_is_not_charged_to_the_waiting(kind: FaultClass) -> None:
    """A4: after half an hour of generating, a refused connection starts a new wait."""
    interrupted = decide(fault(kind), Budget(waiting_since_s=0.0), POLICY, 5000.0, 0.0)
    assert isinstance(interrupted, Wait)
    assert isinstance(decide(fault(FaultClass.NEVER_EXECUTED), interrupted.budget, POLICY, 5000.0, 0.0), Wait)


def test_failure_carries_the_upstreams_words() -> None:
    refused = Fault(FaultClass.REFUSED, "n must be at least 1", Category.USER)
    decision = decide(refused, Budget(), POLICY, 0.0, 0.0)
    assert decision == Fail(Failure("n must be at least 1", Category.USER))


@pytest.mark.parametrize("tries", [0, 1, 5, 6, 1000])
def test_back_off_grows_with_jitter_to_ten_seconds(tries: int) -> None:
    def delay_s(rng_unit: float) -> float:
        decision = decide(fault(FaultClass.NEVER_EXECUTED), Budget(tries=tries), POLICY, 0.0, rng_unit)
        assert isinstance(decision, Wait)
        assert decision.budget.tries == tries + 1
        return decision.delay_s

    longest_s = min(0.25 * 2 ** min(tries, 50), 10.0)
    assert delay_s(0.0) == longest_s / 2
    assert longest_s / 2 < delay_s(0.5) < delay_s(0.999) < longest_s


def test_retry_after_is_a_least_wait() -> None:
    for rng_unit in (0.0, 0.5, 0.999):
        decision = decide(fault(FaultClass.NEVER_EXECUTED, 3.0), Budget(), POLICY, 0.0, rng_unit)
        assert isinstance(decision, Wait)
        assert 3.0 <= decision.delay_s < 4.0
