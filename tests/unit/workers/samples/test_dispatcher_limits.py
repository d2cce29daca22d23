"""How much one worker takes, and that nothing is held when all is over."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shared.config import Settings
from shared.core.errors import Overloaded, StoreError
from shared.core.lifecycle import State
from tests.waiting import DEADLINE_S, until
from tests.worker_bench import AWAY, DONE, OWNER, REPLY_LOST, WorkerBench, session, spec
from workers.samples.live import Ending

KEY = session().key(1)


@pytest.fixture
async def bench() -> WorkerBench:
    return WorkerBench()


async def test_a_draining_worker_takes_nothing_new_but_knows_what_it_has(bench: WorkerBench) -> None:
    await bench.started()
    bench.dispatcher.drain()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "draining"
    assert bench.counters.rejected_draining == 1
    await bench.submit()
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.READY


async def test_samples_in_flight_are_limited() -> None:
    """E3: 429 at the cap, and room again when one ends."""
    bench = WorkerBench(max_in_flight=1)
    await bench.started()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "in_flight"
    assert bench.counters.rejected_in_flight == 1
    bench.executor.finish(KEY)
    await bench.dispatcher.wait_idle()
    await bench.started(2)
    await bench.dispatcher.close()


async def test_bytes_in_flight_are_limited_and_a_reload_may_change_that() -> None:
    bench = WorkerBench(max_in_flight_bytes=1)
    await bench.started()
    with pytest.raises(Overloaded) as caught:
        await bench.submit(2)
    assert caught.value.reason == "bytes"
    assert bench.counters.rejected_bytes == 1
    bench.dispatcher.quota.reconfigure(Settings())
    await bench.started(2)
    await bench.dispatcher.close()
    assert bench.holds_nothing()


async def test_prompts_and_unwritten_results_are_accounted_for(bench: WorkerBench) -> None:
    await bench.submit(1, spec(range(1000)))
    held = bench.dispatcher.quota.in_flight_bytes
    assert held >= len(spec(range(1000)).prompt)
    await until(lambda: bench.executor.started)
    bench.store.fail_before = AWAY
    bench.executor.finish(KEY, Ending(State.READY, bytes(5000)))
    await until(lambda: bench.dispatcher.quota.in_flight_bytes == held + 5000)
    bench.store.fail_before = None
    await bench.dispatcher.wait_idle()
    assert bench.holds_nothing()


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_held_after_any_mixture_of_trouble(seed: int) -> None:
    """Random submissions, failures of the store, cancels and results; in the end all is settled or was never begun."""
    rng, bench = Random(seed), WorkerBench()
    submissions: list[asyncio.Task[None]] = []
    for _ in range(200):
        bench.store.fail_before = AWAY if rng.random() < 0.2 else None
        bench.store.fail_after = REPLY_LOST if rng.random() < 0.2 else None
        seq_id = rng.randrange(40)
        match rng.randrange(4):
            case 0 | 1:
                submissions.append(asyncio.create_task(bench.submit(seq_id)))
            case 2:
                bench.dispatcher.cancel(session().key(seq_id))
            case 3 if submissions:
                rng.choice(submissions).cancel()
        for key in rng.sample(sorted(bench.executor._ends), min(2, len(bench.executor._ends))):
            if not bench.executor._ends[key].done():
                bench.executor.finish(key, DONE)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    bench.store.fail_before = bench.store.fail_after = None
    results = await asyncio.gather(*submissions, return_exceptions=True)
    unexpected = [
        result
        for result in results
        if result is not None and not isinstance(result, (StoreError, asyncio.CancelledError))
    ]
    assert not unexpected, unexpected
    async with asyncio.timeout(DEADLINE_S):
        while bench.dispatcher.in_flight:
            for key in [key for key, end in bench.executor._ends.items() if not end.done()]:
                bench.executor.finish(key)
            await asyncio.sleep(0.001)
    assert bench.holds_nothing()
    assert not bench.server.open_sets[OWNER]
    assert len(bench.executor.started) == len(set(bench.executor.started))
    assert State.PENDING not in {stored.header.state for stored in bench.server.samples.values()}
