"""Polls for all samples of a sampling session, in process: what each client sees, whatever the store and others do."""

from __future__ import annotations

import asyncio

import pytest

from shared.core.lifecycle import State
from shared.core.model import CLONE_SPAN
from shared.http.peer import Connection
from shared.store.recovery import REFILL_S
from tests.app_bench import KEY_A, KEY_B, KEYS, TINY, AppBench, asleep, request_id, session_of, settled
from tests.waiting import until
from tests.worker_bench import OTHER_OWNER, session
from workers.api import results
from workers.samples.live import Ending

KEY = session().key(1)
FAILED = Ending(State.FAILED, b'{"error":"no","category":"server"}')


async def test_a_session_poll_tells_what_ended_and_moves_its_cursor_once(bench: AppBench) -> None:
    finished, failed = await settled(bench), await settled(bench, FAILED, seq_id=2)
    first = (await bench.poll_session()).json
    assert [(entry["request_id"], entry["state"]) for entry in first["completions"]] == [
        (finished, "finished"),
        (failed, "failed"),
    ]
    assert first["completions"][0]["response_payload_uncompressed_size"] == len(TINY)
    again = (await bench.poll_session(cursor=first["cursor"], timeout_s=0.0)).json
    assert again == {"completions": [], "cursor": first["cursor"]}


async def test_a_session_poll_is_held_until_something_ends_anywhere(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    await bench.asample()
    poll = asyncio.create_task(other.poll_session())
    await asleep(other)
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY)
    assert len((await poll).json["completions"]) == 1
    assert len(other.waiters) == 0


async def test_a_clones_poll_tells_only_of_its_own(bench: AppBench) -> None:
    """A10"""
    await settled(bench, seq_id=3 * CLONE_SPAN + 1)
    mine = await bench.poll_session(timeout_s=0.0, target={**TARGET_OF_CLONE, "cloned_sampler_id": 3})
    assert len(mine.json["completions"]) == 1
    assert (await bench.poll_session(timeout_s=0.0)).json["completions"] == []


TARGET_OF_CLONE = {"type": "sampling_session", "sampling_session_id": session().sampling_session_id}


async def test_an_idle_session_poll_ends_with_the_callers_cursor() -> None:
    bench = await AppBench(poll_timeout_s=0.01).open()
    await settled(bench)
    cursor = (await bench.poll_session()).json["cursor"]
    for timeout_s in (None, 0.0, -1.0, 3600.0):
        answered = await bench.poll_session(cursor=cursor, timeout_s=timeout_s)
        assert answered.json == {"completions": [], "cursor": cursor}


async def test_a_cursor_of_another_epoch_starts_anew(bench: AppBench) -> None:
    """C7"""
    promised = await settled(bench)
    answered = await bench.poll_session(cursor=(1 << 52) + 5)
    assert answered.json["completions"][0]["request_id"] == promised


async def test_what_died_together_with_the_log_is_told_as_failed_once(bench: AppBench) -> None:
    """C7, B11: nobody remembers these samples; their client must come and get its 410."""
    await bench.asample(seq_id=10)
    await bench.asample(seq_id=14)
    cursor = (1 << 52) + 5
    first = await bench.poll_session(cursor=cursor, timeout_s=0.0)
    told = {entry["request_id"]: entry["state"] for entry in first.json["completions"]}
    assert {request_id(number) for number in (6, 9, 11, 12, 13, 15)} <= set(told)
    assert set(told.values()) == {"failed"}
    assert not {request_id(10), request_id(14)} & set(told)
    assert (await bench.retrieve(request_id(12))).status == 410
    again = await bench.poll_session(cursor=first.json["cursor"], timeout_s=0.0)
    assert again.json == {"completions": [], "cursor": first.json["cursor"]}


async def test_what_is_lost_is_told_only_when_all_workers_have_told_what_they_run(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7"""
    monkeypatch.setattr(results, "_STORE_RETRY_S", 0.001)
    await bench.asample(seq_id=10)
    bench.server.wipe()
    poll = asyncio.create_task(bench.poll_session(cursor=(1 << 52) + 5))
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 3)
    assert not poll.done()
    bench.clock.advance(REFILL_S)
    await bench.renew_lease()
    assert request_id(11) in {entry["request_id"] for entry in (await poll).json["completions"]}


@pytest.mark.parametrize("text", ["nonsense", "", "x" * 5000, session_of(KEY_A).sampling_session_id])
async def test_an_unknown_session_is_held_and_empty(text: str) -> None:
    """A7, A11: a 4xx would end the client for good, an answer at once would make it spin."""
    bench = await AppBench(poll_timeout_s=0.01, api_keys=KEYS).open()
    target = {"sampling_session_id": text}
    poll = asyncio.create_task(bench.poll_session(target=target, cursor=77, key=KEY_B))
    await asleep(bench)
    answered = await poll
    assert (answered.status, answered.json) == (200, {"completions": [], "cursor": 77})
    assert len(bench.waiters) == 0


async def test_the_hold_of_an_unknown_session_tells_nothing_of_a_real_one(keyed: AppBench) -> None:
    """A11: nor when something ends in the session whose inner name was given."""
    theirs = session_of(KEY_A)
    poll = asyncio.create_task(keyed.poll_session(target={"sampling_session_id": theirs.session_key}, key=KEY_B))
    await asleep(keyed)
    await settled(keyed, of=theirs, key=KEY_A)
    await asyncio.sleep(0)
    assert not poll.done()
    keyed.waiters.send_back()
    assert (await poll).json["completions"] == []


async def test_acknowledgements_count_only_for_the_polled_session(bench: AppBench) -> None:
    mine, _ = await settled(bench), await settled(bench, seq_id=2)
    other = await settled(bench, of=session(1), seq_id=2)
    answered = await bench.poll_session(retrieved_request_ids=[mine, other, "nonsense", request_id(77)])
    assert answered.status == 200
    await bench.expiry.flush()
    assert bench.left_s(KEY) == bench.settings.acked_ttl_s
    for untouched in (session().key(2), session(1).key(2)):
        assert bench.left_s(untouched) == bench.settings.undelivered_ttl_s
    assert bench.counters.acknowledged == 1


async def test_a_poll_with_acknowledgements_is_not_held(bench: AppBench) -> None:
    """SDK 0.36 sends its last ones with nothing pending."""
    finished = await settled(bench)
    cursor = (await bench.poll_session()).json["cursor"]
    answered = await bench.poll_session(cursor=cursor, retrieved_request_ids=[finished])
    assert answered.json == {"completions": [], "cursor": cursor}


async def test_a_client_that_leaves_a_session_poll_is_noticed(bench: AppBench) -> None:
    client = Connection()
    poll = asyncio.create_task(bench.poll_session(connection=client))
    await asleep(bench)
    client.lose(broken=True)
    await poll
    assert len(bench.waiters) == 0
    assert not any(bench.store._watched.values())
