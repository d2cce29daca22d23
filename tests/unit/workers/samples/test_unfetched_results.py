"""What was settled and not fetched: in order, bounded, forgotten when fetched."""

from __future__ import annotations

from shared.core.model import SampleKey
from shared.core.record import Claim
from workers.samples.expiry import UnfetchedResults

CLAIM = Claim("0123456789abcdef", 1, 1, bytes(16))


def key(number: int) -> SampleKey:
    return SampleKey("session", number)


def test_what_was_fetched_is_forgotten() -> None:
    unfetched = UnfetchedResults()
    for number in range(3):
        unfetched.add(key(number), CLAIM, float(number))
    for number in (1, 99):
        unfetched.take(key(number))
    assert list(unfetched.claims()) == [(key(0), CLAIM), (key(2), CLAIM)]


def test_the_due_are_taken_once_and_oldest_first() -> None:
    unfetched = UnfetchedResults()
    for number in range(5):
        unfetched.add(key(number), CLAIM, float(number))
    assert unfetched.take_settled_before(3.0) == [key(0), key(1), key(2)]
    assert unfetched.take_settled_before(3.0) == []
    assert len(unfetched) == 2
    assert unfetched.keys() == [key(3), key(4)]


def test_claims_come_out_as_they_went_in() -> None:
    unfetched = UnfetchedResults()
    claims = [CLAIM, Claim("fedcba9876543210", 65_535, 2**32 - 1, bytes(range(16)))]
    for number, claim in enumerate(claims):
        unfetched.add(key(number), claim, 1e9 + number / 7)
    assert [claim for _, claim in unfetched.claims()] == claims
    assert unfetched.take(key(1)) == 1e9 + 1 / 7


def test_what_is_fetched_while_claims_are_read_disturbs_nobody() -> None:
    unfetched = UnfetchedResults()
    for number in range(3):
        unfetched.add(key(number), CLAIM, 0.0)
    claims = unfetched.claims()
    next(claims)
    unfetched.take(key(1))
    unfetched.add(key(3), CLAIM, 0.0)
    assert [found for found, _ in claims] == [key(1), key(2)]


def test_memory_is_bounded_by_forgetting_the_oldest() -> None:
    unfetched = UnfetchedResults(most=10)
    for number in range(25):
        unfetched.add(key(number), CLAIM, float(number))
    assert [found for found, _ in unfetched.claims()] == [key(number) for number in range(15, 25)]
