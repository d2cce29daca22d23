"""Thousands of requests at once, many of them given up: what is left over must be whole, and each one's own."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from tests.integration.upstream.lines import line

if TYPE_CHECKING:
    from shared.core.faults import Fault
    from tests.integration.upstream.lines import Line

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("both_clients")]

REQUESTS = 3_000
AT_ONCE = 300
# Four times what the short queue holds. Each time that the kernel passes over a connection it waits twice as long.
SAMPLES = 64
LONGEST_S = 0.02
SEED = 20_261_129


async def storm(made: Line) -> dict[int, bytes | bytearray | Fault]:
    """Ask with a nonce in each prompt, half of the requests given up after 0 to 20 ms; what the other half got."""
    sys.stdout.write(f"seed {SEED}\n")
    rng, loop = random.Random(SEED), asyncio.get_running_loop()
    answers: dict[int, bytes | bytearray | Fault] = {}
    for first in range(0, REQUESTS, AT_ONCE):
        tasks = {
            nonce: asyncio.create_task(made.ask(f"r{nonce}-a1", prompt=[10, nonce]))
            for nonce in range(first, first + AT_ONCE)
        }
        for nonce in rng.sample(sorted(tasks), AT_ONCE // 2):
            loop.call_later(rng.random() * LONGEST_S, tasks[nonce].cancel)
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for nonce, outcome in zip(tasks, ended, strict=True):
            if not isinstance(outcome, BaseException):
                answers[nonce] = outcome
            else:
                assert isinstance(outcome, asyncio.CancelledError), outcome
    return answers


def echoed(reply: bytes | bytearray | Fault) -> Any:
    assert isinstance(reply, bytes), reply
    return json.loads(reply)["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("keep_alive_s", [0.001, 4.0], ids=["new connections", "kept connections"])
async def test_requests_given_up_in_a_storm_break_no_other_and_mix_up_nothing(keep_alive_s: float) -> None:
    """B1, B2, scaled down: no descriptor is taken for another's, no reply goes to somebody else."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    config = SimulatorConfig(mode="latency", gen_seconds=LONGEST_S / 2)
    async with Simulator(config) as simulator, line(simulator.url, upstream_keep_alive_s=keep_alive_s) as made:
        answers = await storm(made)
        assert len(answers) >= REQUESTS // 2
        assert {nonce: echoed(reply) for nonce, reply in answers.items()} == {nonce: [10, nonce] for nonce in answers}
        assert not made.upstream.attempts
        assert simulator.stats()["concurrent_duplicates"] == 0
    assert not complaints, complaints


async def test_an_upstream_with_a_short_queue_that_accepts_slowly_gets_all_samples() -> None:
    """B6, scaled down: connections that the kernel does not take at once are waited for, within the connect timeout."""
    async with Simulator(SimulatorConfig(backlog=16)) as simulator, line(simulator.url, read_timeout_s=120.0) as made:
        simulator.set_faults([{"kind": "slow_accept", "delay_s": 0.02}])
        replies = await asyncio.gather(*(made.ask(f"r{number}-a1", prompt=[10, number]) for number in range(SAMPLES)))
        assert [echoed(reply) for reply in replies] == [[10, number] for number in range(SAMPLES)]
        assert made.upstream.failures == 0
        assert simulator.stats()["received"] == SAMPLES
