"""Sampling sessions are what their ids say; whether a session lives is the store's to say, and finished is for good."""

from __future__ import annotations

from random import Random

import pytest

from shared.clock import ManualClock
from shared.core import ids
from shared.core.callers import ANONYMOUS, Caller, KeyLimits
from shared.core.errors import NotFound, Overloaded, SessionFinished, StoreUnavailable
from shared.store.contract import SessionInfo, SessionState
from tests.memory_store import MemoryServer, MemoryStore
from tests.worker_bench import AWAY, SESSION_ID, session
from workers.samples.sessions import Sessions

STRANGER = Caller("stranger", ids.owner_secret("tml-stranger"))
OURS = session()


class Bench:
    def __init__(self, parsed_max: int = 20_000) -> None:
        self.server = MemoryServer(ManualClock(), Random(7))
        self.clock = self.server.clock
        self.store = MemoryStore(self.server)
        self.sessions = Sessions(self.store, self.clock, 300.0, parsed_max)

    def seen_ms(self) -> int:
        return self.server.sessions[SESSION_ID].seen_ms


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_sampling_session_is_rebuilt_from_its_id(bench: Bench) -> None:
    """A20: no store is asked."""
    assert bench.sessions.get(OURS.sampling_session_id, ANONYMOUS) == OURS
    assert bench.store.commands == 0


def test_another_callers_is_not_found_even_when_it_is_cached(bench: Bench) -> None:
    """A11"""
    bench.sessions.get(OURS.sampling_session_id, ANONYMOUS)
    assert bench.sessions.find(OURS.sampling_session_id, STRANGER) is None
    with pytest.raises(NotFound):
        bench.sessions.get(OURS.sampling_session_id, STRANGER)


@pytest.mark.parametrize("text", ["", "abc", "x" * 10_000, "gwss-é", OURS.sampling_session_id[:-1]])
def test_what_is_not_of_our_form_is_not_found(bench: Bench, text: str) -> None:
    """A7"""
    assert bench.sessions.find(text, ANONYMOUS) is None


def test_the_cache_of_parsed_ids_is_bounded() -> None:
    bench = Bench(parsed_max=3)
    for number in range(10):
        bench.sessions.get(session(number).sampling_session_id, ANONYMOUS)
    assert len(bench.sessions._parsed) == 3


async def test_the_store_is_asked_once_per_session(bench: Bench) -> None:
    for _ in range(3):
        await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    assert bench.store.commands == 1
    assert bench.server.sessions[SESSION_ID].state is SessionState.ALIVE


async def test_a_session_that_is_new_here_needs_the_store(bench: Bench) -> None:
    bench.store.fail_before = AWAY
    with pytest.raises(StoreUnavailable):
        await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.store.fail_before = None
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.store.fail_before = AWAY
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)


async def test_a_finished_session_takes_no_samples(bench: Bench) -> None:
    await bench.store.finish_session(SESSION_ID, 0)
    with pytest.raises(SessionFinished):
        await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    assert not await bench.sessions.touch(SESSION_ID)


async def test_a_session_finished_elsewhere_takes_no_samples_from_the_message_on(bench: Bench) -> None:
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.sessions.mark_finished(SESSION_ID)
    with pytest.raises(SessionFinished):
        await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)


async def test_finished_is_for_good_whatever_a_wiped_store_says(bench: Bench) -> None:
    bench.sessions.mark_finished(SESSION_ID)
    bench.sessions.learn(SESSION_ID, SessionInfo(SessionState.UNKNOWN, 0))
    assert not await bench.sessions.touch(SESSION_ID)


async def test_a_wiped_store_makes_no_session_unknown(bench: Bench) -> None:
    """C3: it is alive again with the next sign of life."""
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.server.wipe()
    assert await bench.sessions.touch(SESSION_ID)
    assert bench.server.sessions[SESSION_ID].state is SessionState.ALIVE


async def test_signs_of_life_are_taken_once_and_can_be_given_back(bench: Bench) -> None:
    bench.sessions.note(SESSION_ID)
    bench.sessions.note(SESSION_ID)
    assert bench.sessions.take_noted() == [SESSION_ID]
    assert bench.sessions.take_noted() == []
    bench.sessions.return_noted([SESSION_ID])
    assert bench.sessions.take_noted() == [SESSION_ID]


async def test_sessions_that_nobody_uses_are_forgotten_after_their_last_sign_was_taken(bench: Bench) -> None:
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.clock.advance(601.0)
    assert bench.sessions.take_noted() == [SESSION_ID]
    assert len(bench.sessions) == 0
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    assert bench.store.commands == 2


async def test_those_that_are_used_outlive_older_ones_that_are_not(bench: Bench) -> None:
    for number in range(3):
        bench.sessions.note(f"gws-{number}")
        bench.clock.advance(300.0)
    bench.sessions.note("gws-0")
    bench.clock.advance(299.0)
    bench.sessions.take_noted()
    assert list(bench.sessions._known) == ["gws-2", "gws-0"]


class TestSessionsAtATime:
    """A key that may have two; each session has a name of its own."""

    caller = Caller("a", b"secret", b"digest", KeyLimits(max_sessions=2))
    timeout_s = 300.0

    async def open(self, bench: Bench, *names: str, caller: Caller | None = None) -> None:
        for name in names:
            await bench.sessions.admit(name, caller or self.caller)

    async def test_one_too_many_is_refused_on_every_worker(self, bench: Bench) -> None:
        await self.open(bench, "s1", "s2")
        other = Sessions(MemoryStore(bench.server), bench.clock, self.timeout_s)
        with pytest.raises(Overloaded, match="2 sessions of this key are open, its limit is 2 \\(max-sessions\\)"):
            await other.admit("s3", self.caller)
        await self.open(bench, "s3", caller=STRANGER)

    async def test_a_finished_one_makes_room(self, bench: Bench) -> None:
        await self.open(bench, "s1", "s2")
        await bench.store.finish_session("s1", bench.clock.wall_ms())
        await self.open(bench, "s3")

    async def test_a_silent_one_makes_room_and_a_living_one_does_not(self, bench: Bench) -> None:
        await self.open(bench, "s1", "s2")
        bench.clock.advance(self.timeout_s - 1)
        await bench.sessions.touch("s2")
        bench.clock.advance(2)
        await self.open(bench, "s3")
        with pytest.raises(Overloaded):
            await self.open(bench, "s4")

    async def test_what_was_refused_does_not_count(self, bench: Bench) -> None:
        await self.open(bench, "s1", "s2")
        for name in ("s3", "s4"):
            with pytest.raises(Overloaded):
                await self.open(bench, name)
        await bench.store.finish_session("s1", bench.clock.wall_ms())
        await self.open(bench, "s5")
