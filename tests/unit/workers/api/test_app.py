"""Crowds of requests: what every sample passes through waits for its turn, and the rest does not wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.app_bench import API, KEY_A, KEY_B, KEYS, AppBench, asleep, request_id, session_of
from tests.worker_bench import SESSION_ID, session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OTHER = "fedcba9876543210"
# Many turns' worth.
CROWD = 1000
SEQ_IDS = range(1, CROWD + 1)


@pytest.fixture
async def worker() -> AsyncIterator[AppBench]:
    made = await AppBench().open()
    yield made
    await made.close()


async def test_health_and_heartbeats_are_answered_in_the_midst_of_a_crowd(worker: AppBench) -> None:
    crowd = [asyncio.create_task(worker.asample(seq_id)) for seq_id in SEQ_IDS]
    heartbeat = asyncio.create_task(worker.post("/session_heartbeat", {"session_id": SESSION_ID}))
    assert (await worker.request("GET", API + "/healthz")).status == 200
    await heartbeat
    assert not crowd[-1].done()
    assert {answered.status for answered in await asyncio.gather(*crowd)} == {200}


async def test_a_key_does_not_wait_for_all_that_another_has_sent() -> None:
    worker = await AppBench(api_keys=KEYS).open()
    crowded, quiet = session_of(KEY_A), session_of(KEY_B, 1)
    crowd = [asyncio.create_task(worker.asample(seq_id, crowded, key=KEY_A)) for seq_id in SEQ_IDS]
    assert (await worker.asample(1, quiet, key=KEY_B)).status == 200
    assert sum(submission.done() for submission in crowd) < CROWD / 4
    await asyncio.gather(*crowd)
    await worker.close()


async def test_polls_that_one_announcement_wakes_look_in_turns(worker: AppBench) -> None:
    other = await AppBench(worker.server, OTHER).open()
    for seq_id in SEQ_IDS:
        await worker.submit(seq_id)
    polls = [asyncio.create_task(other.retrieve(request_id(seq_id))) for seq_id in SEQ_IDS]
    await asleep(other, CROWD)
    read, looks = other.store.read, [0]
    # Counted for the turn in which it is.
    other.store.read = lambda key: looks.append(looks.pop() + 1) or read(key)  # type: ignore[method-assign,func-returns-value]
    other.waiters.announced(session().session_key, SEQ_IDS)
    while sum(looks) < CROWD:
        await asyncio.sleep(0)
        looks.append(0)
    assert max(looks) < CROWD / 4
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await other.close()
