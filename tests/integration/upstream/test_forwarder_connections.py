"""The connections to an upstream: who waits for one, which is used again, and whose the time of waiting is."""

from __future__ import annotations

import asyncio

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from shared.clock import ManualClock
from shared.core.lifecycle import State
from shared.histogram import count
from tests.integration.upstream.lines import Line, line
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.mark.slow
async def test_waiting_for_a_connection_is_charged_to_nobody() -> None:
    """A4: two requests for a pool of one connection, each longer than the deadline for connecting."""
    async with (
        Simulator(SimulatorConfig(mode="latency", gen_seconds=0.8)) as simulator,
        line(simulator.url, max_connections=1, connect_timeout_s=0.5, read_timeout_s=1.5) as made,
    ):
        replies = await asyncio.gather(*(made.ask(f"r{number}-a1") for number in range(3)))
        assert all(isinstance(reply, bytes) for reply in replies), replies
        assert simulator.stats()["peak_in_flight"] == 1


async def test_requests_cancelled_while_queued_take_no_connection_with_them(simulator: Simulator) -> None:
    """B3"""
    simulator.set_faults([{"kind": "hold", "next": 10}])
    async with line(simulator.url, max_connections=10) as made:
        holding = [asyncio.create_task(made.ask(f"h{number}-a1")) for number in range(10)]
        await until(lambda: simulator.stats()["in_flight"] == 10)
        queued = [asyncio.create_task(made.ask(f"q{number}-a1")) for number in range(1000)]
        await until(lambda: len(made.upstream.attempts) == 1010)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        replies = await asyncio.gather(*(made.ask(f"n{number}-a1") for number in range(10)))
        assert all(isinstance(reply, bytes) for reply in replies), replies
        assert not made.upstream.attempts
        assert simulator.stats()["received"] == 20


@pytest.mark.slow
async def test_requests_at_the_brink_of_an_idle_connections_end_are_executed_once() -> None:
    """B4, scaled down: the upstream closes after 0.5 s, the gateway after 0.3 s; requests come in between."""
    async with (
        Simulator(SimulatorConfig(keep_alive_s=0.5)) as simulator,
        line(simulator.url, upstream_keep_alive_s=0.3) as made,
    ):
        count = 0
        for pause_s in (0.28, 0.299, 0.3, 0.301, 0.32, 0.48, 0.499, 0.5, 0.501, 0.52):
            states = await asyncio.gather(*(made.execute(count + number) for number in range(4)))
            assert states == [State.READY] * 4
            count += 4
            # What is tested is what becomes of connections that were idle for just so long.
            await asyncio.sleep(pause_s)
        assert simulator.stats()["executions"] == count
        assert made.counters.attempts == count


# -- where the time goes ----------------------------------------------------------------------------------------------


async def release(made: Line, simulator: Simulator) -> None:
    async with made.probes.post(simulator.url + "/_sim/release") as response:
        assert response.status == 200


async def test_waiting_for_a_connection_is_not_the_upstreams_time(simulator: Simulator) -> None:
    simulator.set_faults([{"kind": "hold", "next": 2}])
    clock = ManualClock()
    async with line(simulator.url, clock=clock, max_connections=1) as made:
        first, second = (asyncio.create_task(made.ask(f"r{number}-a1")) for number in range(2))
        await until(lambda: len(made.upstream.attempts) == 2 and simulator.stats()["in_flight"] == 1)
        clock.advance(10.0)
        await release(made, simulator)
        await first
        await until(lambda: simulator.stats()["in_flight"] == 1)
        clock.advance(3.0)
        await release(made, simulator)
        await second
        assert count(made.upstream.queue.snapshot()) == count(made.upstream.latency.snapshot()) == 2
        assert made.upstream.queue.snapshot()[-1] == 10.0
        assert made.upstream.latency.snapshot()[-1] == 13.0
        assert made.upstream.wasted_s == 0.0


async def test_what_was_cut_off_is_wasted_and_what_only_waited_is_not(simulator: Simulator) -> None:
    """B7: the tokens are never told; the time is known."""
    simulator.set_faults([{"kind": "hold", "next": 2}])
    clock = ManualClock()
    async with line(simulator.url, clock=clock, max_connections=1) as made:
        asked = [asyncio.create_task(made.ask(f"r{number}-a1")) for number in range(2)]
        await until(lambda: len(made.upstream.attempts) == 2 and simulator.stats()["in_flight"] == 1)
        clock.advance(4.0)
        for task in reversed(asked):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert made.upstream.wasted_s == 4.0
        assert count(made.upstream.latency.snapshot()) == 0
