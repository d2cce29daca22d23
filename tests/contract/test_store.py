"""What `shared/store/base.py` promises, held against every implementation."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from shared.clock import SystemClock
from shared.core.lifecycle import SETTLED, SETTLING, State, allows
from shared.core.model import SampleKey
from shared.core.record import Claim, Header
from shared.core.upstream_list import PUBLISHED, UpstreamList
from shared.store.base import LogEntry, SessionState, Settled
from shared.store.publishing import publish_upstreams
from shared.store.reaping import reap
from tests.contract.conftest import Heard

if TYPE_CHECKING:
    from shared.store.base import Store
    from tests.contract.conftest import Bench

ALICE, BOB = "alice-0000000000", "bob-000000000000"
DIGEST = bytes(range(16))
KEY = SampleKey("session", 1)
NOW_MS = 1_700_000_000_000
TTL_S = 3600.0
# seq_ids that a double rounds, or that a Lua number cannot hold.
HUGE = [2**53 + 1, 680384511000000001, 2**63 - 1]
ENDINGS = sorted(SETTLING, key=lambda state: state.name)


def claim(owner: str = ALICE, attempt: int = 1, n: int = 2, digest: bytes = DIGEST) -> Claim:
    return Claim(owner, attempt, n, digest)


async def settle(
    store: Store, key: SampleKey, by: Claim, state: State = State.READY, payload: bytes = b"payload"
) -> Settled:
    return await store.settle(key, by, state, payload, ttl_s=TTL_S, now_ms=NOW_MS)


async def state_of(store: Store, key: SampleKey) -> State:
    header = await store.read_header(key)
    return header.state if header is not None else State.GONE


async def bring_to(store: Store, key: SampleKey, state: State) -> None:
    """A sample of ALICE's in this state."""
    if state is State.GONE:
        return
    assert await store.begin(key, claim()) is None
    if state is State.RETRIEVED:
        await settle(store, key, claim())
        assert await store.mark_retrieved([key], ttl_s=300) == 1
    elif state is not State.PENDING:
        await settle(store, key, claim(), state)


# -- begin ------------------------------------------------------------------------------------------------------


async def test_a_sample_begins_once(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.begin(KEY, claim()) is None
    assert await store.read_header(KEY) == Header(State.PENDING, claim())


async def test_of_two_owners_the_first_one_wins(bench: Bench) -> None:
    """A6: the second worker learns whose it is, and what was asked first."""
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


@pytest.mark.parametrize("state", sorted(SETTLED, key=lambda state: state.name))
async def test_a_settled_sample_is_not_begun_again(bench: Bench, state: State) -> None:
    store = await bench.store(ALICE)
    await bring_to(store, KEY, state)
    found = await store.begin(KEY, claim(BOB))
    assert found is not None
    assert (found.state, found.claim) == (state, claim())
    assert await store.reap(BOB, ttl_s=TTL_S, now_ms=NOW_MS) == []


async def test_a_pending_sample_has_no_time_to_live(bench: Bench) -> None:
    """Invariant 5: it never expires while its owner lives."""
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    assert await bench.ttl_s("gw:s:session:1") == -1


async def test_a_store_without_a_memory_limit_tells_none(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.limit_bytes(KEY) == 0


async def test_a_pending_sample_tells_that_it_waits(bench: Bench) -> None:
    """D8: a poll at another worker says so too; only the owner may say it, and an ending forgets it."""
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
    assert await store.count_unread([KEY]) == 1
    assert await store.read_header(SampleKey("session", 99)) is None


# -- settle -----------------------------------------------------------------------------------------------------


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
    """C3: what was in flight when Redis was restarted empty is delivered, and its worker hears of the loss."""
    store = await bench.store(ALICE)
    assert await settle(store, KEY, claim()) is Settled.RESTORED
    assert await state_of(store, KEY) is State.READY


@pytest.mark.parametrize("size_bytes", [0, 1, 256 * 1024 - 41, 256 * 1024 - 40, 256 * 1024, 3_000_000])
async def test_payloads_of_every_size_come_back(bench: Bench, size_bytes: int) -> None:
    """Around the size at which a value moves to the connection for large ones, too."""
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


# -- clocks -----------------------------------------------------------------------------------------------------


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
    """The client confirms at one worker before another has counted what it handed over: both counts are right."""
    store = await bench.store(ALICE)
    await bring_to(store, KEY, State.READY)
    assert await store.acknowledge([KEY], ttl_s=30) == 1
    assert await state_of(store, KEY) is State.RETRIEVED
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    assert await store.mark_retrieved([KEY], ttl_s=300) == 0
    assert await store.acknowledge([KEY], ttl_s=30) == 0
    assert await store.count_unread([KEY]) == 0
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


async def test_the_unread_are_counted(bench: Bench) -> None:
    store = await bench.store(ALICE)
    unread, fetched, pending = (SampleKey("session", number) for number in range(3))
    await bring_to(store, unread, State.FAILED)
    await bring_to(store, fetched, State.RETRIEVED)
    await bring_to(store, pending, State.PENDING)
    assert await store.count_unread([unread, fetched, pending, SampleKey("session", 99)]) == 1


# -- completion logs --------------------------------------------------------------------------------------------


async def complete(store: Store, *seq_ids: int, session: str = "session", state: State = State.READY) -> None:
    for seq_id in seq_ids:
        key = SampleKey(session, seq_id)
        await store.begin(key, claim())
        await settle(store, key, claim(), state)


async def test_completions_come_in_order_and_each_once(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await complete(store, 3, 1)
    first = await store.read_log("session", 0, 0, limit=10)
    assert first.entries == [LogEntry(3, True, 7), LogEntry(1, True, 7)]
    await complete(store, 2, state=State.FAILED)
    second = await store.read_log("session", 0, first.cursor, limit=10)
    assert second.entries == [LogEntry(2, False, 0)]
    assert 0 < first.cursor < second.cursor < 2**53


async def test_the_cursor_stands_still_when_nothing_is_new(bench: Bench) -> None:
    """wire.md, rule 12: a cursor that moves makes an idle client spin."""
    store = await bench.store(ALICE)
    assert (await store.read_log("session", 0, 0, limit=10)).cursor == 0
    await complete(store, 1)
    page = await store.read_log("session", 0, 0, limit=10)
    for _ in range(3):
        again = await store.read_log("session", 0, page.cursor, limit=10)
        assert (again.entries, again.cursor) == ([], page.cursor)


async def test_a_lost_reply_is_given_again(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await complete(store, 1, 2)
    first = await store.read_log("session", 0, 0, limit=1)
    assert await store.read_log("session", 0, first.cursor, limit=9) == await store.read_log(
        "session", 0, first.cursor, limit=9
    )


async def test_pages_are_limited(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await complete(store, *range(10))
    seen, cursor = [], 0
    while (page := await store.read_log("session", 0, cursor, limit=3)).entries:
        assert len(page.entries) <= 3
        seen += [entry.seq_id for entry in page.entries]
        cursor = page.cursor
    assert seen == list(range(10))


@pytest.mark.parametrize("foreign", [1, 2**32 * 5 + 1, 2**53 - 1])
async def test_a_cursor_of_another_epoch_reads_from_the_start(bench: Bench, foreign: int) -> None:
    store = await bench.store(ALICE)
    await complete(store, 1, 2)
    assert len((await store.read_log("session", 0, foreign, limit=10)).entries) == 2


async def test_a_cursor_past_the_head_reads_from_the_start(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await complete(store, 1, 2)
    head = (await store.read_log("session", 0, 0, limit=10)).cursor
    assert len((await store.read_log("session", 0, head + 1, limit=10)).entries) == 2


async def test_a_log_that_began_anew_is_not_mistaken_for_the_old_one(bench: Bench) -> None:
    """C7: after a wipe, or an hour of silence, the client's old cursor must hide nothing."""
    store = await bench.store(ALICE)
    await complete(store, 1, 2, 3)
    old = (await store.read_log("session", 0, 0, limit=10)).cursor
    bench.forget("gw:l:{session}:0")
    assert (await store.read_log("session", 0, old, limit=10)).cursor == 0
    await complete(store, 11, 12, 13, 14)
    page = await store.read_log("session", 0, old, limit=10)
    assert [entry.seq_id for entry in page.entries] == [11, 12, 13, 14]


@pytest.mark.parametrize("seq_id", HUGE)
async def test_large_seq_ids_are_not_rounded(bench: Bench, seq_id: int) -> None:
    """A10, wire.md rule 13: neighbours stay apart, in the record, in the log, in the reaper."""
    store = await bench.store(ALICE)
    neighbour = seq_id - 1
    await complete(store, seq_id)
    await store.begin(SampleKey("session", neighbour), claim())
    assert await state_of(store, SampleKey("session", seq_id)) is State.READY
    assert await state_of(store, SampleKey("session", neighbour)) is State.PENDING
    assert await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [SampleKey("session", neighbour)]
    page = await store.read_log("session", seq_id // 10**9, 0, limit=10)
    assert [entry.seq_id for entry in page.entries] == [seq_id, neighbour]


async def test_clones_and_sessions_have_logs_of_their_own(bench: Bench) -> None:
    """A5, A10"""
    store = await bench.store(ALICE)
    await complete(store, 1, 10**9 + 1, 2 * 10**9)
    await complete(store, 1, session="other")
    for session, clone_id, seq_id in (
        ("session", 0, 1),
        ("session", 1, 10**9 + 1),
        ("session", 2, 2 * 10**9),
        ("other", 0, 1),
    ):
        page = await store.read_log(session, clone_id, 0, limit=10)
        assert [entry.seq_id for entry in page.entries] == [seq_id]


async def test_old_entries_are_trimmed_and_the_cursor_goes_on(bench: Bench) -> None:
    """Bounded by time, not by what a client has read; the newest entry always stays."""
    store = await bench.store(ALICE)
    for seq_id in range(200):
        key = SampleKey("session", seq_id)
        await store.begin(key, claim())
        late_ms = 0 if seq_id < 100 else 2 * TTL_S * 1000
        await store.settle(key, claim(), State.READY, b"", ttl_s=TTL_S, now_ms=NOW_MS + int(late_ms))
    page = await store.read_log("session", 0, 0, limit=1000)
    seen = [entry.seq_id for entry in page.entries]
    assert set(range(100, 200)) <= set(seen)
    assert len(seen) < 150
    await complete(store, 500)
    assert [entry.seq_id for entry in (await store.read_log("session", 0, page.cursor, limit=10)).entries] == [500]


# -- announcements ----------------------------------------------------------------------------------------------


async def test_who_watches_hears_and_others_do_not(bench: Bench) -> None:
    heard, deaf = Heard(), Heard()
    alice, bob = await bench.store(ALICE, heard), await bench.store(BOB, deaf)
    await alice.watch("session")
    await bob.watch("other")
    bob.announce("session", 2**63 - 1)
    bob.announce("session", 5)
    bob.announce("other", 7)
    await heard.until(lambda heard: len(heard.announced) == 2)
    await deaf.until(lambda heard: len(heard.announced) == 1)
    assert heard.announced == [("session", 2**63 - 1), ("session", 5)]
    assert deaf.announced == [("other", 7)]


async def test_watches_are_counted(bench: Bench) -> None:
    heard = Heard()
    store = await bench.store(ALICE, heard)
    await store.watch("session")
    await store.watch("session")
    store.unwatch("session")
    store.announce("session", 1)
    await heard.until(lambda heard: heard.announced == [("session", 1)])


async def test_the_payload_is_there_before_it_is_announced(bench: Bench) -> None:
    """Invariant 3: whoever is woken finds the result."""
    heard = Heard()
    alice, bob = await bench.store(ALICE), await bench.store(BOB, heard)
    await bob.watch("session")
    for seq_id in range(50):
        await complete(alice, seq_id)
        alice.announce("session", seq_id)
    await heard.until(lambda heard: len(heard.announced) == 50)
    states = [await state_of(bob, SampleKey("session", seq_id)) for _, seq_id in heard.announced]
    assert states == [State.READY] * 50


# -- sessions ---------------------------------------------------------------------------------------------------


async def test_a_session_lives_by_its_signs_of_life(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert (await store.touch_session("s", 1000)).state is SessionState.UNKNOWN
    info = await store.touch_session("s", 2000)
    assert (info.state, info.seen_ms) == (SessionState.ALIVE, 2000)
    assert (await store.touch_session("s", 1500)).seen_ms == 2000
    unknown, known = await store.session_infos(["nobody", "s"])
    assert (unknown.state, unknown.seen_ms) == (SessionState.UNKNOWN, 0)
    assert (known.state, known.seen_ms) == (SessionState.ALIVE, 2000)


async def test_a_finished_session_stays_finished(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.touch_session("s", 1000)
    assert await store.finish_session("s", 2000)
    assert not await store.finish_session("s", 3000)
    assert (await store.touch_session("s", 4000)).state is SessionState.FINISHED
    assert (await store.session_infos(["s"]))[0].state is SessionState.FINISHED


async def test_a_session_that_was_lost_can_be_finished(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.finish_session("s", 1)
    assert (await store.session_infos(["s"]))[0].state is SessionState.FINISHED


async def test_the_sessions_of_a_key_are_told_to_every_worker(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.sessions_of("key-1") == []
    await alice.enter_session("key-1", "s1")
    await bob.enter_session("key-1", "s2")
    await bob.enter_session("key-2", "s3")
    assert sorted(await alice.sessions_of("key-1")) == ["s1", "s2"]
    await bob.drop_sessions("key-1", ["s1", "never"])
    await bob.drop_sessions("key-1", [])
    assert await alice.sessions_of("key-1") == ["s2"]


async def test_a_clone_number_is_reserved_once_per_session(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.reserve_clone("session", 999_999_999)
    assert not await bob.reserve_clone("session", 999_999_999)
    assert await bob.reserve_clone("other", 999_999_999)


# -- ownership --------------------------------------------------------------------------------------------------


async def test_a_lease_is_taken_held_and_given_back(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert await store.renew_lease(ALICE, ttl_s=30) is False
    assert await store.renew_lease(ALICE, ttl_s=30) is True
    assert await store.lapsed_owners() == []
    await store.release_lease(ALICE)
    assert await store.lapsed_owners() == []


async def test_a_lease_can_be_looked_at_without_taking_it(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert not (await store.watch_lease(ALICE)).held
    assert await store.renew_lease(ALICE, ttl_s=30) is False
    seen = await store.watch_lease(ALICE)
    assert seen.held
    assert seen.server_age_s >= 0


async def test_a_refill_lasts_as_long_as_the_longest_of_its_windows(bench: Bench) -> None:
    """Each owner may shorten its own."""
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await bob.refill_left_s() == 0
    await alice.note_refill(ALICE, window_s=1000)
    assert 900 < await bob.refill_left_s() <= 1000
    await bob.note_refill(BOB, window_s=300)
    await alice.note_refill(ALICE, window_s=100)
    assert 200 < await alice.refill_left_s() <= 300


async def test_an_owner_that_leaves_samples_behind_is_found(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.renew_lease(ALICE, ttl_s=30)
    await store.begin(KEY, claim())
    await store.release_lease(ALICE)
    assert await store.lapsed_owners() == [ALICE]
    assert await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [KEY]
    assert await store.lapsed_owners() == []


async def test_reaping_ends_only_what_the_owner_still_runs(bench: Bench) -> None:
    """A stale entry of the open set must not end a sample that is settled, or somebody else's."""
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    await complete(alice, 1)
    await bring_to(alice, SampleKey("session", 2), State.PENDING)
    await bob.begin(SampleKey("session", 3), claim(BOB))
    await alice.begin(SampleKey("session", 3), claim(ALICE))
    assert await bob.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [SampleKey("session", 2)]
    assert await state_of(bob, SampleKey("session", 1)) is State.READY
    assert await state_of(bob, SampleKey("session", 3)) is State.PENDING


async def test_the_reaped_are_logged_and_expire(bench: Bench) -> None:
    """Invariant 6: pollers learn that they are lost, and submit again."""
    store = await bench.store(ALICE)
    await store.begin(KEY, claim())
    await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS)
    assert (await store.read_log("session", 0, 0, limit=10)).entries == [LogEntry(1, False, 0)]
    assert await bench.ttl_s("gw:s:session:1") == pytest.approx(TTL_S, abs=5)


async def test_reaping_goes_on_in_batches_to_the_end_and_tells(bench: Bench) -> None:
    heard = Heard()
    alice, bob = await bench.store(ALICE), await bench.store(BOB, heard)
    await bob.watch("session")
    keys = [SampleKey("session", number) for number in range(1234)]
    await asyncio.gather(*(alice.begin(key, claim()) for key in keys))
    assert await reap(bob, ALICE, TTL_S, bench.clock) == len(keys)
    await heard.until(lambda heard: len(heard.announced) == len(keys))


# -- messages ---------------------------------------------------------------------------------------------------


async def test_a_control_message_is_heard_and_left(bench: Bench) -> None:
    heard, other = Heard(), Heard()
    alice, bob = await bench.store(ALICE, heard), await bench.store(BOB, other)
    await bob.send_control(ALICE, b"for alice")
    await bob.broadcast(b"for all")
    await heard.until(lambda heard: sorted(heard.controls) == [b"for alice", b"for all"])
    await other.until(lambda heard: heard.controls == [b"for all"])
    assert await alice.take_inbox(ALICE) == [b"for alice"]
    assert await alice.take_inbox(ALICE) == []


# -- what the workers agree on ----------------------------------------------------------------------------------


async def test_without_a_published_list_there_is_none(bench: Bench) -> None:
    assert await (await bench.store(ALICE)).read_upstreams() is None


async def test_the_latest_list_of_upstreams_is_kept(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    first, second = UpstreamList(NOW_MS, ("http://a:1", "http://b:1/x y")), UpstreamList(NOW_MS + 1, ())
    assert await alice.offer_upstreams(first) == first
    assert await bob.read_upstreams() == first
    assert await bob.offer_upstreams(second) == second
    assert await alice.offer_upstreams(first) == second
    assert await alice.offer_upstreams(UpstreamList(second.version, ("http://late",))) == second
    assert await alice.read_upstreams() == second


async def test_fifty_lists_race_and_the_latest_wins(bench: Bench) -> None:
    store = await bench.store(ALICE)
    lists = [UpstreamList(NOW_MS + number, (f"http://{number}",)) for number in range(50)]
    await asyncio.gather(*(store.offer_upstreams(offered) for offered in reversed(lists)))
    assert await store.read_upstreams() == lists[-1]


class _StandingClock(SystemClock):
    """Two hosts whose clocks show the same, or one that lags behind."""

    def wall_ms(self) -> int:
        return NOW_MS


async def test_a_list_that_is_published_is_the_latest_and_everybody_is_told(bench: Bench) -> None:
    heard = Heard()
    alice, bob = await bench.store(ALICE), await bench.store(BOB, heard)
    await alice.offer_upstreams(UpstreamList(NOW_MS + 3_600_000, ("http://of-a-fast-clock",)))
    published = await publish_upstreams(alice, ["http://a", "http://b"], _StandingClock())
    await heard.until(lambda heard: heard.controls == [PUBLISHED])
    assert await bob.read_upstreams() == published
    assert published.urls == ("http://a", "http://b")


async def test_of_lists_published_at_once_all_are_and_one_is_last(bench: Bench) -> None:
    store = await bench.store(ALICE)
    lists = await asyncio.gather(
        *(publish_upstreams(store, [f"http://{number}"], _StandingClock()) for number in range(20))
    )
    assert len({published.version for published in lists}) == 20
    assert await store.read_upstreams() == max(lists, key=lambda published: published.version)


async def test_a_lock_has_one_holder(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.take_lock("load", ALICE, ttl_s=60)
    assert await alice.take_lock("load", ALICE, ttl_s=60)
    assert not await bob.take_lock("load", BOB, ttl_s=60)
    assert await bob.take_lock("other", BOB, ttl_s=60)
    await bob.release_lock("load", BOB)
    assert not await bob.take_lock("load", BOB, ttl_s=60)
    await alice.release_lock("load", ALICE)
    assert await bob.take_lock("load", BOB, ttl_s=60)


async def test_of_fifty_that_want_a_lock_one_gets_it(bench: Bench) -> None:
    store = await bench.store(ALICE)
    taken = await asyncio.gather(*(store.take_lock("load", f"owner-{number}", ttl_s=60) for number in range(50)))
    assert sum(taken) == 1


async def test_a_lock_whose_holder_died_is_taken_by_another(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.take_lock("load", ALICE, ttl_s=60)
    bench.let_lock_lapse("load")
    assert await bob.take_lock("load", BOB, ttl_s=60)
    await alice.release_lock("load", ALICE)
    assert not await alice.take_lock("load", ALICE, ttl_s=60)


async def test_a_lock_lasts_as_long_as_it_was_taken_for(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.take_lock("load", ALICE, ttl_s=60)
    assert 55 < bench.lock_ttl_s("load") <= 60


async def test_info_and_ping(bench: Bench) -> None:
    store = await bench.store(ALICE)
    await store.ping()
    info = await store.info()
    assert info.policy == "noeviction"
    assert info.version
    assert store.connected_since_s is not None
