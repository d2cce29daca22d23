"""What a worker holds: samples and passed requests share its limits, and a drain waits for both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.config import Settings
from shared.core.callers import ANONYMOUS
from shared.core.errors import Overloaded
from shared.counters import Counters
from workers.samples.expiry import UnfetchedResults
from workers.samples.quota import Quota
from workers.samples.store_share import StoreShare


def quota(**settings: Any) -> Quota:
    return Quota(Counters(), Settings(**settings), StoreShare(UnfetchedResults()))


def test_what_is_passed_on_and_what_is_kept_share_the_limit() -> None:
    """E3"""
    held = quota(max_in_flight=2)
    sample = held.take(ANONYMOUS, 10)
    with held.beside(ANONYMOUS, 5):
        assert (held.passed_in_flight, held.in_flight_bytes) == (1, 15)
        with pytest.raises(Overloaded):
            held.take(ANONYMOUS, 1)
        with pytest.raises(Overloaded), held.beside(ANONYMOUS, 1):
            pass
    assert (held.passed_in_flight, held.in_flight_bytes) == (0, 10)
    held.release(sample, 10)
    assert held.in_flight_bytes == 0


def test_a_request_that_fails_gives_its_room_back() -> None:
    held = quota(max_in_flight=1)
    with pytest.raises(RuntimeError), held.beside(ANONYMOUS, 5):
        raise RuntimeError
    held.release(held.take(ANONYMOUS, 1), 1)


def test_a_full_store_stops_samples_only() -> None:
    held = quota()
    with pytest.raises(Overloaded):
        held.take(ANONYMOUS, 1, store_full=True)
    with pytest.raises(Overloaded):
        held.take(ANONYMOUS, 1, store_refilling=True)
    with held.beside(ANONYMOUS, 1):
        pass


async def test_it_is_idle_when_both_have_ended_and_takes_nothing_while_it_drains() -> None:
    """B12"""
    held = quota()
    sample = held.take(ANONYMOUS, 1)
    idle = asyncio.create_task(held.idle.wait())
    with held.beside(ANONYMOUS, 1):
        held.draining = True
        held.release(sample, 1)
        await asyncio.sleep(0)
        assert not idle.done()
        with pytest.raises(Overloaded):
            held.take(ANONYMOUS, 1)
    await idle


def test_what_is_buffered_counts_beside_what_runs() -> None:
    held = quota(max_in_flight_bytes=100)
    sample = held.take(ANONYMOUS, 90)
    held.require_memory(ANONYMOUS, 0, 90)
    held.count_memory(ANONYMOUS, 90)
    assert (held.in_flight_bytes, held.buffered_bytes) == (180, 90)
    with pytest.raises(Overloaded):
        held.require_memory(ANONYMOUS, 0, 11)
    with pytest.raises(Overloaded):
        held.take(ANONYMOUS, 1)
    held.require_memory(ANONYMOUS, 90, 1000)
    held.release(sample, 90)
    held.count_memory(ANONYMOUS, -90)
    assert (held.in_flight_bytes, held.buffered_bytes) == (0, 0)
