"""The store is everybody's: what fills it is refused, and what empties it or keeps work alive is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.config import Settings
from tests.app_bench import AppBench, opened, request_id, settled
from tests.worker_bench import SESSION_ID

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    async with opened(poll_timeout_s=0.01) as made:
        yield made


async def test_a_full_store_takes_nothing_new(bench: AppBench) -> None:
    """It takes no session, sampler or sample, and keeps no record of what it refused."""
    bench.server.is_full = True
    sampler = {"session_id": SESSION_ID, "sampling_session_seq_id": 0, "base_model": "sim/tiny"}
    answers = [
        await bench.post("/create_session", {}),
        await bench.post("/create_sampling_session", sampler),
        await bench.asample(1),
    ]
    assert [answered.status for answered in answers] == [429] * 3
    assert all("the result store is full" in answered.json["detail"] for answered in answers[:2])
    assert not bench.server.samples
    await bench.housekeeping.tend_store()
    assert list(bench.server.sessions) in ([], [SESSION_ID]), "only a session of a known id shows signs of life"


async def test_a_full_store_serves_heartbeats_polls_and_acknowledgements(bench: AppBench) -> None:
    name = await settled(bench)
    bench.server.is_full = True
    assert (await bench.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    assert (await bench.retrieve(name)).status == 200
    assert (await bench.poll_session(retrieved_request_ids=[request_id(1)])).status == 200
    await bench.expiry.flush()
    assert bench.counters.acknowledged == 1


def test_what_is_known_of_a_session_outlives_it_and_its_results() -> None:
    assert Settings(session_timeout_s=300, undelivered_ttl_s=3600).session_ttl_s == 3900
    assert Settings(session_timeout_s=7200, undelivered_ttl_s=3600).session_ttl_s == 7500
