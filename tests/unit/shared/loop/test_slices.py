"""What is done to everything in flight leaves the event loop its turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.loop.slices import SLICE, batches, in_slices, in_turns


async def turns_until(many: int, done: list[Any]) -> list[int]:
    """How many are done after each turn of the loop, until so many are."""
    after = [len(done)]
    while len(done) < many:
        await asyncio.sleep(0)
        after.append(len(done))
    return after


@pytest.mark.parametrize("many", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 7])
async def test_a_slice_is_done_now_and_one_in_each_turn_after(many: int) -> None:
    done: list[int] = []
    in_slices(done.append, range(many))
    after = await turns_until(many, done)
    assert after == [min(many, SLICE * (turn + 1)) for turn in range(len(after))]
    assert done == list(range(many))


async def test_what_a_slice_wakes_runs_before_the_next_slice() -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []

    def wake(index: int) -> None:
        order.append("wakes")
        loop.call_soon(order.append, "runs")

    in_slices(wake, range(2 * SLICE))
    await turns_until(4 * SLICE, order)
    assert order == [*["wakes"] * SLICE, *["runs"] * SLICE] * 2


def test_batches_hold_all_in_order() -> None:
    assert list(batches(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(batches([], 2)) == []


async def test_a_turn_passes_after_each_batch() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(turn())
    await asyncio.sleep(0)
    seen = [(batch, turns) async for batch in in_turns("abcde", 2)]
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    assert [batch for batch, _ in seen] == [["a", "b"], ["c", "d"], ["e"]]
    assert [passed for _, passed in seen] == [0, 1, 2]
