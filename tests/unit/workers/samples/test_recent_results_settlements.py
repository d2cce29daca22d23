"""What was settled and not fetched: in order, bounded, forgotten when fetched."""

from __future__ import annotations

from shared.core.model import SampleKey
from shared.core.record import Claim
from workers.samples.recent_results import UnfetchedResults

CLAIM = Claim("0123456789abcdef", 1, 1, bytes(16))


def key(number: int) -> SampleKey:
    return SampleKey("session", number)


def test_what_was_fetched_is_forgotten() -> None:
    settlements = UnfetchedResults()
    for number in range(3):
        settlements.add(key(number), CLAIM, float(number))
    settlements.fetched([key(1), key(99)])
    assert list(settlements.claims()) == [(key(0), CLAIM), (key(2), CLAIM)]


def test_the_due_are_taken_once_and_oldest_first() -> None:
    settlements = UnfetchedResults()
    for number in range(5):
        settlements.add(key(number), CLAIM, float(number))
    assert settlements.take_settled_before(3.0) == [key(0), key(1), key(2)]
    assert settlements.take_settled_before(3.0) == []
    assert len(settlements) == 2
    assert settlements.keys() == [key(3), key(4)]


def test_claims_come_out_as_they_went_in() -> None:
    settlements = UnfetchedResults()
    claims = [CLAIM, Claim("fedcba9876543210", 65_535, 2**32 - 1, bytes(range(16)))]
    for number, claim in enumerate(claims):
        settlements.add(key(number), claim, 1e9 + number / 7)
    assert [claim for _, claim in settlements.claims()] == claims
    assert settlements.handed_over(key(1)) == 1e9 + 1 / 7


def test_what_is_fetched_while_claims_are_read_disturbs_nobody() -> None:
    settlements = UnfetchedResults()
    for number in range(3):
        settlements.add(key(number), CLAIM, 0.0)
    claims = settlements.claims()
    next(claims)
    settlements.fetched([key(1)])
    settlements.add(key(3), CLAIM, 0.0)
    assert [found for found, _ in claims] == [key(1), key(2)]


def test_memory_is_bounded_by_forgetting_the_oldest() -> None:
    settlements = UnfetchedResults(most=10)
    for number in range(25):
        settlements.add(key(number), CLAIM, float(number))
    assert [found for found, _ in settlements.claims()] == [key(number) for number in range(15, 25)]
