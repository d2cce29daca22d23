"""A result that has just settled here is handed out once, soon, and to nobody else's harm."""

from __future__ import annotations

import pytest

from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim, Header, Record
from workers.samples.recent_results import FreshResults

CLAIM = Claim("0123456789abcdef", 1, 1, b"d" * 16)


def key(seq_id: int) -> SampleKey:
    return SampleKey("session", seq_id)


def record(state: State = State.READY, size_bytes: int = 10) -> Record:
    return Record(Header(state, CLAIM), memoryview(bytes(size_bytes)))


def test_it_is_handed_out_once() -> None:
    fresh, settled = FreshResults(600.0), record()
    fresh.keep(key(1), settled, 10.0)
    assert fresh.take(key(2), 10.0) is None
    assert fresh.take(key(1), 10.1) is settled
    assert fresh.take(key(1), 10.1) is None
    assert not len(fresh)


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_what_is_no_result_is_the_stores_to_tell(state: State) -> None:
    """What asks for a new submission would ask for it again when that one already runs elsewhere."""
    fresh = FreshResults(600.0)
    fresh.keep(key(1), record(state), 10.0)
    assert not len(fresh)


def test_a_large_one_is_not_kept() -> None:
    fresh = FreshResults(600.0)
    fresh.keep(key(1), record(size_bytes=100_000), 10.0)
    assert not len(fresh)


@pytest.mark.parametrize(("ttl_s", "fresh_s"), [(600.0, 5.0), (1.0, 1.0)])
def test_an_old_one_is_not_handed_out_and_is_given_back(ttl_s: float, fresh_s: float) -> None:
    fresh = FreshResults(ttl_s)
    fresh.keep(key(1), record(), 10.0)
    fresh.keep(key(2), record(), 10.5)
    fresh.drop_stale(10.0 + fresh_s)
    assert len(fresh) == 1
    assert fresh.take(key(2), 10.5 + fresh_s) is None


def test_there_are_never_more_than_so_many() -> None:
    fresh = FreshResults(600.0, most=3)
    for seq_id in range(10):
        fresh.keep(key(seq_id), record(), 10.0)
    assert len(fresh) == 3
    assert fresh.take(key(6), 10.0) is None
    assert fresh.take(key(7), 10.0) is not None
