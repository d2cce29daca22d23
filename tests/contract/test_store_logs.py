"""The promises of `shared/store/contract.py` about completion logs and announcements, tested on every store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.store.contract import LogEntry
from tests.contract.conftest import Heard
from tests.contract.samples import ALICE, BOB, HUGE, NOW_MS, TTL_S, claim, complete, state_of

if TYPE_CHECKING:
    from tests.contract.conftest import Bench


# -- completion logs -----------------------------------------------------------------------------------------------


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
    """wire.md, rule 12: a cursor that moves makes an idle client poll without pause."""
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
    """C7: after a wipe, or an hour without polls, the client's old cursor must hide no entry."""
    store = await bench.store(ALICE)
    await complete(store, 1, 2, 3)
    old = (await store.read_log("session", 0, 0, limit=10)).cursor
    bench.forget("gw:d:{session}:0")
    assert (await store.read_log("session", 0, old, limit=10)).cursor == 0
    await complete(store, 11, 12, 13, 14)
    page = await store.read_log("session", 0, old, limit=10)
    assert [entry.seq_id for entry in page.entries] == [11, 12, 13, 14]


@pytest.mark.parametrize("seq_id", HUGE)
async def test_large_seq_ids_are_not_rounded(bench: Bench, seq_id: int) -> None:
    """A10, wire.md rule 13: neighbouring numbers stay apart in the record, the log and the reaper."""
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
    """Age alone decides what is trimmed, not what a client has read; the newest entry always stays."""
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


# -- announcements -------------------------------------------------------------------------------------------------


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
    """Invariant 3: every poll that is woken finds the result."""
    heard = Heard()
    alice, bob = await bench.store(ALICE), await bench.store(BOB, heard)
    await bob.watch("session")
    for seq_id in range(50):
        await complete(alice, seq_id)
        alice.announce("session", seq_id)
    await heard.until(lambda heard: len(heard.announced) == 50)
    states = [await state_of(bob, SampleKey("session", seq_id)) for _, seq_id in heard.announced]
    assert states == [State.READY] * 50
