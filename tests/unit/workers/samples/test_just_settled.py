"""A result that has just settled here is handed out once, soon, and to nobody else's harm."""

from __future__ import annotations

import pytest

from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim, Header, Record
from workers.samples.waiters import JustSettled

CLAIM = Claim("0123456789abcdef", 1, 1, b"d" * 16)


def key(seq_id: int) -> SampleKey:
    return SampleKey("session", seq_id)


def record(state: State = State.READY, size_bytes: int = 10) -> Record:
    return Record(Header(state, CLAIM), memoryview(bytes(size_bytes)))


def test_it_is_handed_out_once() -> None:
    results, settled = JustSettled(600.0), record()
    results.keep(key(1), settled, 10.0)
    assert results.take(key(2), 10.0) is None
    assert results.take(key(1), 10.1) is settled
    assert results.take(key(1), 10.1) is None
    assert not len(results)


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_what_is_no_result_is_the_stores_to_tell(state: State) -> None:
    """What asks for a new submission would ask for it again when that one already runs elsewhere."""
    results = JustSettled(600.0)
    results.keep(key(1), record(state), 10.0)
    assert not len(results)


def test_a_large_one_is_not_kept() -> None:
    results = JustSettled(600.0)
    results.keep(key(1), record(size_bytes=100_000), 10.0)
    assert not len(results)


@pytest.mark.parametrize(("ttl_s", "kept_s"), [(600.0, 5.0), (1.0, 1.0)])
def test_an_old_one_is_not_handed_out_and_is_given_back(ttl_s: float, kept_s: float) -> None:
    results = JustSettled(ttl_s)
    results.keep(key(1), record(), 10.0)
    results.keep(key(2), record(), 10.5)
    results.drop_stale(10.0 + kept_s)
    assert len(results) == 1
    assert results.take(key(2), 10.5 + kept_s) is None


def test_there_are_never_more_than_so_many() -> None:
    results = JustSettled(600.0, most=3)
    for seq_id in range(10):
        results.keep(key(seq_id), record(), 10.0)
    assert len(results) == 3
    assert results.take(key(6), 10.0) is None
    assert results.take(key(7), 10.0) is not None
