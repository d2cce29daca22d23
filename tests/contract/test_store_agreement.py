"""The promises of `shared/store/contract.py` about sessions, owners and shared settings, tested on every store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from shared.clock import SystemClock
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.upstream_list import PUBLISHED, UpstreamList
from shared.store.contract import LogEntry, SessionState
from shared.store.recovery import publish_upstreams, reap
from tests.contract.conftest import Heard
from tests.contract.samples import ALICE, BOB, KEY, NOW_MS, SESSION_TTL_S, TTL_S, bring_to, claim, complete, state_of

if TYPE_CHECKING:
    from tests.contract.conftest import Bench


# -- sessions ------------------------------------------------------------------------------------------------------


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


async def test_a_session_is_kept_as_long_as_the_store_was_told(bench: Bench) -> None:
    """A finished one too, the list of a key's sessions, and the client numbers of their sampling sessions."""
    if bench.redis is None:
        pytest.skip("the store in memory keeps sessions for ever")
    store = await bench.store(ALICE)
    await store.touch_session("s", 1000)
    assert await bench.ttl_s("gw:n:s") == pytest.approx(SESSION_TTL_S, abs=5)
    await store.finish_session("f", 1000)
    assert await bench.ttl_s("gw:n:f") == pytest.approx(SESSION_TTL_S, abs=5)
    await store.enter_session("key-1", "s")
    await store.reserve_clone("session", 7)
    await store.touch_session("s", 1001)
    assert await bench.ttl_s("gw:m:key-1") == pytest.approx(SESSION_TTL_S, abs=5)
    assert await bench.ttl_s("gw:c:{session}") == pytest.approx(SESSION_TTL_S, abs=5)


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


async def test_workers_report_what_nobody_fetched(bench: Bench) -> None:
    """The reports of the others are read with one's own, and lapse unless they are repeated."""
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await alice.report_unfetched(ALICE, b"a=1 b=2", ttl_s=30) == []
    assert await bob.report_unfetched(BOB, b"", ttl_s=30) == [b"a=1 b=2"]
    assert await alice.report_unfetched(ALICE, b"a=3", ttl_s=30) == [b""]
    assert await bob.report_unfetched(BOB, b"", ttl_s=30) == [b"a=3"]
    if bench.redis is not None:
        assert await bench.ttl_s("gw:q") == pytest.approx(30, abs=5)
        bench.redis.command("HSET", "gw:q", ALICE, "1 a=9")
        assert await bob.report_unfetched(BOB, b"", ttl_s=30) == [], "from long ago"


# -- ownership -----------------------------------------------------------------------------------------------------


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
    """An owner may shorten its own window."""
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
    """A stale entry of the open set must not end a sample that is settled or belongs to another owner."""
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    await complete(alice, 1)
    await bring_to(alice, SampleKey("session", 2), State.PENDING)
    await bob.begin(SampleKey("session", 3), claim(BOB))
    await alice.begin(SampleKey("session", 3), claim(ALICE))
    assert await bob.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == [SampleKey("session", 2)]
    assert await state_of(bob, SampleKey("session", 1)) is State.READY
    assert await state_of(bob, SampleKey("session", 3)) is State.PENDING


async def test_the_reaped_are_logged_and_expire(bench: Bench) -> None:
    """Invariant 6: pollers learn that the samples are lost, and submit them again."""
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


# -- messages ------------------------------------------------------------------------------------------------------


async def test_a_control_message_is_heard_and_left(bench: Bench) -> None:
    heard, other = Heard(), Heard()
    alice, bob = await bench.store(ALICE, heard), await bench.store(BOB, other)
    await bob.send_control(ALICE, b"for alice")
    await bob.broadcast(b"for all")
    await heard.until(lambda heard: sorted(heard.controls) == [b"for alice", b"for all"])
    await other.until(lambda heard: heard.controls == [b"for all"])
    assert await alice.take_inbox(ALICE) == [b"for alice"]
    assert await alice.take_inbox(ALICE) == []


# -- what the workers agree on -------------------------------------------------------------------------------------


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
    """The clock of two hosts that show the same time, or of one that lags behind."""

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


async def test_info(bench: Bench) -> None:
    store = await bench.store(ALICE)
    info = await store.info()
    assert info.policy == "noeviction"
    assert info.version
    assert store.connected_since_s is not None
