"""A turn of the loop does so much and no more, in order, and loses nobody."""

from __future__ import annotations

import asyncio

from shared.loop.turns import TurnLimit

PER_TURN = 4


async def turn() -> None:
    """Until everything that was ready has run once."""
    await asyncio.sleep(0)


class Crowd:
    """Tasks that become ready in the same turn; `done` grows as they go on."""

    def __init__(self, count: int, turns: TurnLimit, key_digest: bytes = b"") -> None:
        self.done: list[int] = []
        self._party = key_digest
        self.tasks = [asyncio.create_task(self._go(number, turns)) for number in range(count)]

    async def _go(self, number: int, turns: TurnLimit) -> None:
        await turns.wait(self._party)
        self.done.append(number)


async def test_a_crowd_goes_on_in_its_order_a_few_each_turn_and_others_get_in_between() -> None:
    turns, seen = TurnLimit(PER_TURN), []
    crowd = Crowd(5 * PER_TURN + 1, turns)
    while len(crowd.done) < len(crowd.tasks):
        before = len(crowd.done)
        await turn()
        seen.append(len(crowd.done) - before)
    assert crowd.done == sorted(crowd.done)
    assert max(seen) <= PER_TURN
    assert len(seen) >= 6
    assert len(turns) == 0


async def test_a_turn_may_become_smaller_and_larger_again() -> None:
    turns, seen = TurnLimit(PER_TURN), []
    crowd = Crowd(10 * PER_TURN, turns)
    for turn_number in range(20):
        before = len(crowd.done)
        await turn()
        seen.append(len(crowd.done) - before)
        turns.per_turn = PER_TURN if turn_number < 3 or turn_number > 10 else 1
    assert max(seen) == PER_TURN
    # What was let in before goes on in the turn after.
    assert set(seen[6:11]) == {1}
    assert len(crowd.done) == len(crowd.tasks)
    assert crowd.done == sorted(crowd.done)


async def test_a_crowd_of_one_key_makes_another_wait_for_one_turn_and_not_for_all() -> None:
    """E4"""
    turns = TurnLimit(PER_TURN)
    crowd = Crowd(10 * PER_TURN, turns, b"A")
    await turn()
    quiet = Crowd(1, turns, b"B")
    while not quiet.done:
        await turn()
    # Those that were let go before it came, and the turn that it is in.
    assert len(crowd.done) <= 3 * PER_TURN
    await asyncio.gather(*crowd.tasks)
    assert crowd.done == sorted(crowd.done)


async def test_few_go_on_at_once() -> None:
    turns = TurnLimit(PER_TURN)
    crowd = Crowd(PER_TURN, turns)
    await turn()
    assert crowd.done == list(range(PER_TURN))
    for _ in range(3):
        await turn()
    again = Crowd(PER_TURN, turns)
    await turn()
    assert len(again.done) == PER_TURN


async def test_nobody_goes_before_those_who_wait() -> None:
    turns = TurnLimit(PER_TURN)
    crowd = Crowd(3 * PER_TURN, turns)
    await turn()
    while len(turns):
        assert not turns.try_take()
        await turn()
    await asyncio.gather(*crowd.tasks)
    await turn()
    assert [turns.try_take() for _ in range(PER_TURN + 1)] == [True] * PER_TURN + [False]


async def test_who_is_cancelled_takes_no_room_and_holds_up_nobody() -> None:
    turns = TurnLimit(PER_TURN)
    crowd = Crowd(4 * PER_TURN, turns)
    await turn()
    for task in crowd.tasks[PER_TURN : 3 * PER_TURN]:
        task.cancel()
    await asyncio.gather(*crowd.tasks, return_exceptions=True)
    assert crowd.done == [*range(PER_TURN), *range(3 * PER_TURN, 4 * PER_TURN)]
    assert len(turns) == 0


async def test_who_was_cancelled_costs_its_key_no_turn() -> None:
    turns = TurnLimit(1)
    await turns.wait()
    gone, key, other = (Crowd(count, turns, key_digest) for count, key_digest in ((50, b"A"), (1, b"A"), (20, b"B")))
    await turn()
    for task in gone.tasks:
        task.cancel()
    await asyncio.gather(*gone.tasks, *key.tasks, return_exceptions=True)
    assert len(other.done) <= 3
    await asyncio.gather(*other.tasks)
    assert len(turns) == 0


async def test_it_rests_when_there_is_nothing_to_do() -> None:
    """No callback keeps the loop awake after the last one."""
    turns = TurnLimit(PER_TURN)
    await Crowd(3 * PER_TURN, turns).tasks[-1]
    for _ in range(5):
        await turn()
    assert turns._renewing is False


async def test_a_start_that_raises_leaves_the_others_their_turns() -> None:
    def broken() -> bool:
        raise RuntimeError("broken")

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    turns = TurnLimit(PER_TURN)
    crowd = Crowd(PER_TURN, turns)
    await turn()
    turns.enter(b"", broken)
    after = Crowd(3 * PER_TURN, turns)
    await asyncio.wait([*crowd.tasks, *after.tasks])
    assert len(after.done) == 3 * PER_TURN
    assert len(reported) == 1
    assert len(turns) == 0
