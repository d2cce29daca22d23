"""Requests are started a few in a turn, keys in turn, and at once where nobody waits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from shared.loop.turns import TurnLimit

T = TypeVar("T")


def note(started: list[T], what: T) -> bool:
    started.append(what)
    return True


async def test_what_has_room_starts_at_once() -> None:
    lane, started = TurnLimit(2), list[str]()
    lane.enter(b"", partial(note, started, "a"))
    lane.enter(b"", partial(note, started, "b"))
    assert started == ["a", "b"]
    assert not len(lane)


async def test_the_rest_has_the_turns_after() -> None:
    lane, started = TurnLimit(2), list[int]()
    for number in range(5):
        lane.enter(b"", partial(note, started, number))
    assert (started, len(lane)) == ([0, 1], 3)
    await asyncio.sleep(0)
    assert (started, len(lane)) == ([0, 1, 2, 3], 1)
    await asyncio.sleep(0)
    assert started == [0, 1, 2, 3, 4]


async def test_who_comes_later_in_the_turn_waits_behind_those_that_wait() -> None:
    lane, started = TurnLimit(1), list[str]()
    for name in "abc":
        lane.enter(b"", partial(note, started, name))
    await asyncio.sleep(0)
    lane.enter(b"", partial(note, started, "d"))
    assert started == ["a", "b"]
    for _ in range(2):
        await asyncio.sleep(0)
    assert started == ["a", "b", "c", "d"]


async def test_keys_go_in_turn() -> None:
    lane, started = TurnLimit(1), list[str]()
    for name in ("a1", "a2", "a3", "a4"):
        lane.enter(b"a", partial(note, started, name))
    lane.enter(b"b", partial(note, started, "b1"))
    for _ in range(4):
        await asyncio.sleep(0)
    assert started == ["a1", "a2", "b1", "a3", "a4"]


async def test_a_turn_in_which_nobody_waits_is_whole_again() -> None:
    lane, started = TurnLimit(1), list[str]()
    lane.enter(b"", partial(note, started, "a"))
    # The turn's end, and the loop's rest.
    for _ in range(3):
        await asyncio.sleep(0)
    lane.enter(b"", partial(note, started, "b"))
    assert started == ["a", "b"]


async def test_what_starts_may_let_another_in() -> None:
    lane, started = TurnLimit(1), list[str]()

    def first() -> bool:
        started.append("a")
        lane.enter(b"", partial(note, started, "b"))
        return True

    lane.enter(b"", first)
    assert started == ["a"]
    await asyncio.sleep(0)
    assert started == ["a", "b"]


async def test_what_is_let_in_by_what_had_to_wait_takes_room() -> None:
    lane, started = TurnLimit(2), list[str]()

    def first() -> bool:
        lane.enter(b"", partial(note, started, "c"))
        return note(started, "b")

    for start in (partial(note, started, "a"), partial(note, started, "a"), first, partial(note, started, "d")):
        lane.enter(b"", start)
    await asyncio.sleep(0)
    # Two in this turn, one of them within the other.
    assert (started, len(lane)) == (["a", "a", "c", "b"], 1)


async def test_who_has_gone_takes_no_room() -> None:
    lane, started = TurnLimit(1), list[str]()
    lane.enter(b"", partial(note, started, "a"))
    lane.enter(b"", lambda: False)
    lane.enter(b"", partial(note, started, "b"))
    await asyncio.sleep(0)
    assert started == ["a", "b"]
