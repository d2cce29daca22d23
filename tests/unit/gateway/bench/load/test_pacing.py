"""The SDK's dispatch limits: 400 submissions at once, a pause after a 429, then ten at once for ten seconds."""

from __future__ import annotations

import asyncio

from gateway.bench.load.pacing import (
    MAX_SUBMITS,
    MAX_SUBMITS_THROTTLED,
    SubmitGate,
    SubmitPolicy,
    at_most,
    backpressure_pause_s,
)
from shared.clock import ManualClock
from tests.waiting import until


def opened(policy: SubmitPolicy, now_s: float, tries: int = 1_000) -> int:
    return sum(policy.try_open(now_s) is not None for _ in range(tries))


def test_four_hundred_submissions_at_once() -> None:
    policy = SubmitPolicy()
    assert opened(policy, 0.0) == MAX_SUBMITS == 400
    policy.close(throttled=False)
    assert opened(policy, 0.0) == 1


def test_nothing_starts_for_a_second_after_a_429_then_ten_at_once_for_ten_seconds() -> None:
    policy = SubmitPolicy()
    policy.back_pressure(100.0, pause_s=1.0)
    assert opened(policy, 100.9) == 0
    assert opened(policy, 101.0) == MAX_SUBMITS_THROTTLED == 10
    assert opened(policy, 110.9) == 0
    assert opened(policy, 111.0) == MAX_SUBMITS - MAX_SUBMITS_THROTTLED


def test_submissions_from_before_the_429_do_not_count_against_the_ten() -> None:
    policy = SubmitPolicy()
    assert opened(policy, 0.0, tries=50) == 50
    policy.back_pressure(0.0, pause_s=1.0)
    assert opened(policy, 1.0) == MAX_SUBMITS_THROTTLED
    policy.close(throttled=True)
    assert policy.try_open(1.0) is True


def test_time_alone_changes_something_at_the_end_of_pause_and_throttle() -> None:
    policy = SubmitPolicy()
    assert policy.next_change_s(0.0) is None
    policy.back_pressure(0.0, pause_s=1.0)
    assert policy.next_change_s(0.5) == 1.0
    assert policy.next_change_s(1.0) == 11.0
    assert policy.next_change_s(11.0) is None


def test_long_prompts_pause_longer() -> None:
    assert backpressure_pause_s(13_000) == 1.0
    assert backpressure_pause_s(13_200) == 5.0


async def entered(tasks: list[asyncio.Task[bool]]) -> int:
    for _ in range(3):
        await asyncio.sleep(0)
    return sum(task.done() for task in tasks)


async def test_the_gate_holds_everybody_while_paused_and_lets_ten_in_afterwards() -> None:
    clock = ManualClock()
    gate = SubmitGate(clock)
    gate.back_pressure(1.0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.enter()) for _ in range(30)]
        assert await entered(tasks) == 0
        clock.advance(1.0)
        gate.wake()
        assert await entered(tasks) == 10
        clock.advance(10.0)
        gate.wake()
        assert await entered(tasks) == 30
    gate.close()


async def test_whoever_gives_up_waiting_leaves_no_place_taken() -> None:
    gate = SubmitGate(ManualClock())
    places = [await gate.enter() for _ in range(MAX_SUBMITS)]
    impatient, patient = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
    await entered([impatient, patient])
    impatient.cancel()
    await asyncio.wait([impatient])
    gate.leave(places.pop())
    assert await patient is False


async def test_a_place_given_in_the_moment_of_giving_up_is_passed_on() -> None:
    gate = SubmitGate(ManualClock())
    places = [await gate.enter() for _ in range(MAX_SUBMITS)]
    impatient, patient = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
    await entered([impatient, patient])
    gate.leave(places.pop())
    impatient.cancel()
    await asyncio.wait([impatient])
    assert impatient.cancelled()
    assert await patient is False


async def test_so_many_at_a_time_and_all_in_order() -> None:
    begun: list[int] = []
    ends = [asyncio.Event() for _ in range(5)]

    async def run(item: int) -> None:
        begun.append(item)
        await ends[item].wait()

    running = asyncio.create_task(at_most(2, iter(range(5)), run))
    for end, expected in ((1, [0, 1]), (0, [0, 1, 2]), (3, [0, 1, 2, 3]), (2, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3, 4])):
        await until(lambda expected=expected: begun == expected, f"{expected} to have begun")  # type: ignore[misc]
        ends[end].set()
    await running
