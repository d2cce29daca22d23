"""The promises of `shared/store/contract.py` about samples, tested on every implementation."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from shared.core.lifecycle import SETTLED, SETTLING, State, allows
from shared.core.model import SampleKey
from shared.core.record import Claim, Header
from shared.store.contract import Settled
from tests.contract.samples import ALICE, BOB, ENDINGS, KEY, NOW_MS, TTL_S, bring_to, claim, settle, state_of

if TYPE_CHECKING:
    from tests.contract.conftest import Bench


# -- begin ---------------------------------------------------------------------------------------------------------


async def test_a_sample_begins_once(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.begin(KEY, claim()) is None
    assert await store.read_header(KEY) == Header(State.PENDING, claim())


async def test_of_two_owners_the_first_one_wins(bench: Bench) -> None:
    """A6: the second worker learns who owns the sample, and the first request."""
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.begin(KEY, claim(ALICE)) is None
    assert await bob.begin(KEY, claim(BOB, digest=bytes(16))) == Header(State.PENDING, claim(ALICE))
    assert await bob.reap(BOB, ttl_s=TTL_S, now_ms=NOW_MS) == []
    assert await state_of(bob, KEY) is State.PENDING


async def test_fifty_owners_race_and_one_wins(bench: Bench) -> None:
    owners = [f"owner-{number:010}" for number in range(50)]
    store = await bench.store(ALICE)
    found = await asyncio.gather(*(store.begin(KEY, claim(owner)) for owner in owners))
    assert [header for header in found if header is None] == [None]


async def test_beginning_again_tells_the_owner_that_it_had(bench: Bench) -> None:
    """The reply was lost: the owner repeats, and finds its own claim."""
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await store.begin(KEY, claim()) == Header(State.PENDING, claim())


@pytest.mark.parametrize("state", [state for state in State if state in SETTLED])
async def test_a_settled_sample_is_not_begun_again(bench: Bench, state: State) -> None:
    store = await bench.store(ALICE)
    await bring_to(store, KEY, state)
    found = await store.begin(KEY, claim(BOB))
    assert found is not None
    assert (found.state, found.claim) == (state, claim())
    assert await store.reap(BOB, ttl_s=TTL_S, now_ms=NOW_MS) == []


async def test_a_pending_sample_has_no_time_to_live(bench: Bench) -> None:
    """Invariant 5: a PENDING sample never expires while its owner lives."""
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await bench.ttl_s("gw:s:session:1") == -1


async def test_a_store_without_a_memory_limit_tells_none(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.limit_bytes(KEY) == 0


async def test_a_pending_sample_tells_that_it_waits(bench: Bench) -> None:
    """D8: a poll at another worker sees it too; only the owner may note it, and settling removes it."""
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    store.mark_paused(KEY, claim(BOB), paused=True)
    assert await store.read_header(KEY) == Header(State.PENDING, claim())
    store.mark_paused(KEY, claim(), paused=True)
    assert await store.read_header(KEY) == Header(State.PENDING, claim(), paused=True)
    assert await store.begin(KEY, claim(BOB)) == Header(State.PENDING, claim(), paused=True)
    assert await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [KEY]
    store.mark_paused(KEY, claim(), paused=True)
    store.mark_paused(SampleKey("session", 99), claim(), paused=True)
    assert await store.read_header(KEY) == Header(State.ORPHANED, claim())
    assert await store.unread([KEY]) == [KEY]
    assert await store.read_header(SampleKey("session", 99)) is None


# -- settle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ENDINGS)
async def test_the_owner_settles(bench: Bench, state: State) -> None:
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await settle(store, KEY, claim(), state) is Settled.WRITTEN
    record = await store.read(KEY)
    assert record is not None
    assert (record.header, bytes(record.payload)) == (Header(state, claim()), b"payload")
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(TTL_S, abs=5)


@pytest.mark.parametrize(("state", "ending"), list(itertools.product(State, ENDINGS)))
async def test_illegal_steps_change_nothing(bench: Bench, state: State, ending: State) -> None:
    """Invariant 2, for every pair of the table: the first terminal state wins."""
    store = await bench.store(ALICE)
    await bring_to(store, KEY, state)
    before = await store.read_header(KEY)
    settled = await settle(store, KEY, claim(), ending, b"late")
    if allows(state, SETTLING[ending]):
        assert settled is (Settled.RESTORED if state is State.GONE else Settled.WRITTEN)
        return
    reached = State.READY if state is State.RETRIEVED else state
    assert settled is (Settled.REPEATED if reached is ending else Settled.REFUSED)
    assert await store.read_header(KEY) == before
    record = await store.read(KEY)
    assert record is not None
    assert bytes(record.payload) != b"late"


@pytest.mark.parametrize("stale", [claim(BOB), claim(ALICE, attempt=2)])
async def test_only_the_owning_attempt_settles(bench: Bench, stale: Claim) -> None:
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await settle(store, KEY, stale) is Settled.REFUSED
    assert await state_of(store, KEY) is State.PENDING


async def test_a_late_result_of_a_reaped_sample_is_dropped(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [KEY]
    assert await settle(store, KEY, claim()) is Settled.REFUSED
    assert await state_of(store, KEY) is State.ORPHANED


async def test_settling_again_is_safe_and_logged_once(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert [await settle(store, KEY, claim()) for _ in range(3)] == [
        Settled.WRITTEN,
        Settled.REPEATED,
        Settled.REPEATED,
    ]
    assert len((await store.read_log("session", 0, 0, limit=10)).entries) == 1


async def test_a_wiped_store_takes_the_result_all_the_same(bench: Bench) -> None:
    """C3: a sample in flight when Redis restarted empty is delivered, and its worker learns of the loss."""
    store = await bench.store(ALICE)
    assert await settle(store, KEY, claim()) is Settled.RESTORED
    assert await state_of(store, KEY) is State.READY


@pytest.mark.parametrize("size_bytes", [0, 1, 256 * 1024 - 41, 256 * 1024 - 40, 256 * 1024, 3_000_000])
async def test_payloads_of_every_size_come_back(bench: Bench, size_bytes: int) -> None:
    """Including sizes around the one from which a value uses the second connection."""
    store = await bench.store(ALICE)
    payload = (b"0123456789abcdef" * (size_bytes // 16 + 1))[:size_bytes]
    await store.begin(KEY, claim())
    await settle(store, KEY, claim(), payload=payload)
    record = await store.read(KEY)
    assert record is not None
    assert record.payload == payload


async def test_what_is_not_there_reads_as_nothing(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.read(KEY) is None
    assert await store.read_header(KEY) is None


# -- clocks --------------------------------------------------------------------------------------------------------


async def test_a_handed_over_result_starts_the_retrieved_clock_once(bench: Bench) -> None:
    """Invariant 4: no clock is ever extended by another read."""
    store = await bench.store(ALICE)
    await bring_to(store, KEY, State.READY)
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    assert await state_of(store, KEY) is State.RETRIEVED
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(300, abs=5)
    assert await store.mark_retrieved([KEY], ttl_s=3000) == 0
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(300, abs=5)


async def test_an_acknowledgement_shortens_what_is_left(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await bring_to(store, KEY, State.RETRIEVED)
    assert await store.acknowledge([KEY], ttl_s=30) == 1
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(30, abs=5)
    assert await store.acknowledge([KEY], ttl_s=1) == 0
    assert await store.mark_retrieved([KEY], ttl_s=1) == 0
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(30, abs=5)


async def test_an_acknowledgement_that_comes_first_leaves_the_hand_over_to_be_counted(bench: Bench) -> None:
    """One worker gets the acknowledgement before another has counted its hand-over: both counts are right."""
    store = await bench.store(ALICE)
    await bring_to(store, KEY, State.READY)
    assert await store.acknowledge([KEY], ttl_s=30) == 1
    assert await state_of(store, KEY) is State.RETRIEVED
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    assert await store.mark_retrieved([KEY], ttl_s=300) == 0
    assert await store.acknowledge([KEY], ttl_s=30) == 0
    assert await store.unread([KEY]) == []
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(30, abs=5)


async def test_a_clock_never_lengthens_a_life(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await bring_to(store, KEY, State.READY)
    assert await store.mark_retrieved([KEY], ttl_s=TTL_S * 10) == 1
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(TTL_S, abs=5)


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.STALE, State.ORPHANED])
async def test_every_ending_has_the_same_clocks_and_keeps_its_state(bench: Bench, state: State) -> None:
    store = await bench.store(ALICE)
    await bring_to(store, KEY, state)
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    header = await store.read_header(KEY)
    assert header is not None
    assert (header.state, header.handed_over) == (state, True)
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(300, abs=5)


async def test_pending_and_missing_samples_have_no_clock(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    keys = [KEY, SampleKey("session", 99)]
    assert await store.mark_retrieved(keys, ttl_s=1) == 0
    assert await store.acknowledge(keys, ttl_s=1) == 0
    assert await bench.ttl_s("gw:s:session:1") == -1


async def test_many_clocks_start_at_once(bench: Bench) -> None:
    store = await bench.store(ALICE)
    keys = [SampleKey("session", number) for number in range(1201)]
    await asyncio.gather(*(bring_to(store, key, State.READY) for key in keys))
    assert await store.mark_retrieved(keys, ttl_s=300) == len(keys)
    assert await store.acknowledge([], ttl_s=30) == 0


async def test_the_unread_are_found(bench: Bench) -> None:
    store = await bench.store(ALICE)
    unread, fetched, pending = (SampleKey("session", number) for number in range(3))
    await bring_to(store, unread, State.FAILED)
    await bring_to(store, fetched, State.RETRIEVED)
    await bring_to(store, pending, State.PENDING)
    assert await store.unread([fetched, unread, pending, SampleKey("session", 99)]) == [unread]
