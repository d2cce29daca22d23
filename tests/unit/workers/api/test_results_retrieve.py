"""Polls for one sample and cancels, in process: what each client sees, whatever the store and other workers do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.core.callers import ANONYMOUS
from shared.core.lifecycle import State
from shared.histogram import count
from shared.http.peer import Connection
from shared.store.recovery import REFILL_S
from tests.app_bench import (
    KEY_A,
    KEY_B,
    TINY,
    AppBench,
    LeavingConnection,
    asleep,
    request_id,
    session_of,
    settled,
)
from tests.waiting import DEADLINE_S, until
from tests.worker_bench import AWAY, OTHER_OWNER, SESSION_ID, session
from workers.api import results
from workers.samples.live import Ending

KEY = session().key(1)
LARGE = Ending(State.READY, bytes(64 * 1024 + 1))
FAILED = Ending(State.FAILED, b'{"error":"no","category":"server"}')
FORMS = ["abc", "", "x" * 10_000, "\u00e9\u4e2d", "gwss-x:1", 100000000000000000000, None, ["r"]]


# -- retrieve_future -----------------------------------------------------------------------------------------------


async def test_a_poll_is_held_until_the_sample_ends_here(bench: AppBench) -> None:
    promised = (await bench.asample()).json["request_id"]
    poll = asyncio.create_task(bench.retrieve(promised))
    await asleep(bench)
    bench.executor.finish(KEY, Ending(State.READY, b"result"))
    answered = await poll
    assert (answered.status, answered.body) == (200, b"result")
    assert answered.headers["content-type"] == "application/x-protobuf"
    assert len(bench.waiters) == 0


async def test_a_poll_on_another_worker_is_woken(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    poll = asyncio.create_task(other.retrieve(promised))
    await asleep(other)
    assert not poll.done()
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY, Ending(State.READY, b"result"))
    answered = await poll
    assert (answered.status, answered.body) == (200, b"result")
    assert not any(other.store._watched.values())


async def test_a_poll_that_is_woken_for_nothing_looks_once_and_sleeps_again(bench: AppBench) -> None:
    """C4: a subscription was cut and is back; the sample still runs."""
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    polls = [asyncio.create_task(other.retrieve(promised)), asyncio.create_task(other.poll_session())]
    await asleep(other, 2)
    before = other.store.commands
    other.on_gap()
    await asleep(other, 2)
    assert other.store.commands == before + 2
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY)
    assert [answered.status for answered in await asyncio.gather(*polls)] == [200, 200]
    await other.close()


async def test_a_poll_that_is_not_answered_in_time_is_408_with_the_queues_state() -> None:
    bench = await AppBench(poll_timeout_s=0.01).open()
    promised = (await bench.asample()).json["request_id"]
    answered = await bench.retrieve(promised)
    assert (answered.status, answered.json) == (
        408,
        {"type": "try_again", "request_id": promised, "queue_state": "active"},
    )
    running = bench.dispatcher.samples.get(KEY)
    assert running is not None
    running.paused_reason = "upstream answered 503"
    answered = await bench.retrieve(promised)
    assert answered.json["queue_state"] == "paused_capacity"
    assert answered.json["queue_state_reason"] == "upstream answered 503"
    await bench.close()


async def test_a_poll_at_another_worker_is_told_that_no_upstream_takes_the_sample(bench: AppBench) -> None:
    """A15, D8"""
    other = await AppBench(bench.server, OTHER_OWNER, poll_timeout_s=0.01).open()
    promised = (await bench.asample()).json["request_id"]
    running = bench.dispatcher.samples.get(KEY)
    assert running is not None
    for paused, state in ((True, "paused_capacity"), (False, "active")):
        bench.store.mark_paused(KEY, running.claim, paused=paused)
        answered = await other.retrieve(promised)
        assert (answered.status, answered.json["queue_state"]) == (408, state)
    other.store.fail_before = AWAY
    answered = await other.retrieve(promised)
    assert (answered.status, answered.json["queue_state"]) == (408, "paused_capacity")
    await other.close()


async def test_old_sdks_get_json(bench: AppBench) -> None:
    answered = await bench.retrieve(await settled(bench), accept="application/json")
    assert answered.headers["content-type"] == "application/json"
    assert answered.json["sequences"] == []


async def test_a_failure_is_200_with_its_category(bench: AppBench) -> None:
    answered = await bench.retrieve(await settled(bench, FAILED))
    assert (answered.status, answered.json) == (200, {"error": "no", "category": "server"})


@pytest.mark.parametrize("state", [State.STALE, State.ORPHANED])
async def test_what_was_interrupted_is_410(bench: AppBench, state: State) -> None:
    answered = await bench.retrieve(await settled(bench, Ending(state)))
    assert answered.status == 410
    assert "submit it again" in answered.json["detail"]


async def test_a_well_formed_id_that_is_no_longer_known_is_410(bench: AppBench) -> None:
    """A7, A20"""
    assert (await bench.retrieve(request_id(99))).status == 410
    finished = await settled(bench)
    bench.clock.advance(bench.settings.undelivered_ttl_s)
    assert (await bench.retrieve(finished)).status == 410


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_no_id_of_ours_is_one_plain_404(bench: AppBench, form: Any) -> None:
    """A7, A19: and costs no store a command."""
    commands = bench.store.commands
    answered = await bench.retrieve(form)
    assert (answered.status, answered.json) == (404, {"detail": "there is no such request"})
    assert (await bench.post("/cancel_future", {"request_id": form})).status == 404
    assert bench.store.commands == commands


async def test_anothers_id_is_what_an_unknown_one_is(keyed: AppBench) -> None:
    """A11: the owner's result is untouched."""
    finished = await settled(keyed, Ending(State.READY, b"result"), of=session_of(KEY_A), key=KEY_A)
    unknown = await keyed.retrieve("abc", key=KEY_B)
    stranger = await keyed.retrieve(finished, key=KEY_B)
    assert (stranger.status, stranger.body) == (unknown.status, unknown.body) == (404, unknown.body)
    assert (await keyed.post("/cancel_future", {"request_id": finished}, key=KEY_B)).status == 404
    assert (await keyed.retrieve(finished, key=KEY_A)).body == b"result"


async def test_only_a_delivered_reply_starts_the_clock(bench: AppBench) -> None:
    """A2"""
    finished = await settled(bench, Ending(State.READY, b"result"))
    await bench.retrieve(finished, connection=LeavingConnection())
    await bench.expiry.flush()
    assert bench.left_s(KEY) == bench.settings.undelivered_ttl_s
    bench.clock.advance(400.0)
    assert (await bench.retrieve(finished)).body == b"result"
    await bench.expiry.flush()
    assert bench.left_s(KEY) == bench.settings.retrieved_ttl_s
    bench.clock.advance(100.0)
    assert (await bench.retrieve(finished)).body == b"result"
    await bench.expiry.flush()
    assert bench.left_s(KEY) == bench.settings.retrieved_ttl_s - 100.0


@pytest.mark.parametrize("trace", [None, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "nonsense"])
async def test_a_sample_keeps_its_callers_trace_context(bench: AppBench, trace: str | None) -> None:
    await bench.asample(trace=trace)
    running = bench.dispatcher.samples.get(KEY)
    assert running is not None
    assert running.trace == (trace if trace != "nonsense" else None)


async def test_the_stages_of_a_sample_are_timed(bench: AppBench) -> None:
    finished = await settled(bench)
    bench.clock.advance(7.0)
    for _ in range(2):  # the second time it was delivered before
        await bench.retrieve(finished)
    stages = bench.counters.stages.snapshot()
    assert {name: (count(histogram), histogram[-1]) for name, histogram in stages.items()} == {
        "accept": (1, 0.0),
        "store": (1, 0.0),
        "delivery": (1, 7.0),
    }
    assert bench.counters.result_bytes == len(TINY)


async def test_a_client_that_leaves_a_held_poll_is_noticed(bench: AppBench) -> None:
    """A2"""
    promised = (await bench.asample()).json["request_id"]
    client = Connection()
    poll = asyncio.create_task(bench.retrieve(promised, connection=client))
    await asleep(bench)
    client.lose(broken=True)
    await poll
    assert bench.counters.polls_abandoned == 1
    assert len(bench.waiters) == 0


async def test_a_size_announcement_starts_no_clock(bench: AppBench) -> None:
    finished = await settled(bench, LARGE)
    answered = await bench.retrieve(finished, allow_metadata_only=True)
    assert answered.json == {"status": "complete_metadata", "response_payload_size": len(LARGE.payload)}
    await bench.expiry.flush()
    assert bench.left_s(KEY) == bench.settings.undelivered_ttl_s
    assert len((await bench.retrieve(finished)).body) == len(LARGE.payload)


async def test_a_small_result_is_never_announced_by_its_size(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, LARGE.payload[1:]))
    answered = await bench.retrieve(finished, allow_metadata_only=True)
    assert answered.headers["content-type"] == "application/x-protobuf"


async def test_trouble_with_the_store_is_a_held_poll() -> None:
    """A9: never a reply that the SDK repeats at once."""
    bench = await AppBench(poll_timeout_s=0.02).open()
    bench.store.fail_before = AWAY
    for answered in (await bench.retrieve(request_id()), await bench.poll_session()):
        assert answered.status in (200, 408)
    assert bench.store.commands < 10
    assert (await bench.poll_session()).json == {"completions": [], "cursor": 0}


async def test_a_poll_right_behind_its_result_needs_no_store(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, b"result"))
    bench.store.fail_before = AWAY
    assert (await bench.retrieve(finished)).body == b"result"
    bench.store.fail_before = None
    before = bench.store.commands
    assert (await bench.retrieve(finished)).body == b"result"
    assert bench.store.commands > before


async def test_a_poll_after_the_result_was_forgotten_is_told_so_by_the_store(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, b"result"))
    bench.clock.advance(bench.settings.undelivered_ttl_s + 1.0)
    assert (await bench.retrieve(finished)).status == 410


async def test_a_held_poll_is_answered_when_the_store_is_back(bench: AppBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A9, C3"""
    monkeypatch.setattr(results, "_STORE_RETRY_S", 0.001)
    finished = await settled(bench, Ending(State.READY, b"result"))
    # The first poll has it from the worker, the next ones from the store.
    await bench.retrieve(finished)
    bench.store.fail_before = AWAY
    polls = [asyncio.create_task(bench.retrieve(finished)), asyncio.create_task(bench.poll_session())]
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 5)
    assert not any(poll.done() for poll in polls)
    bench.store.fail_before = None
    retrieved, polled = await asyncio.gather(*polls)
    assert retrieved.body == b"result"
    assert [entry["request_id"] for entry in polled.json["completions"]] == [finished]


async def test_a_missing_record_says_nothing_while_a_store_is_refilled(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: the sample may be running on a worker that has not entered it again."""
    monkeypatch.setattr(results, "_STORE_RETRY_S", 0.001)
    bench.server.wipe()
    poll = asyncio.create_task(bench.retrieve(request_id(5)))
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 3)
    assert not poll.done()
    bench.clock.advance(REFILL_S)
    await bench.renew_lease()
    assert (await poll).status == 410


async def test_a_store_that_was_emptied_is_noticed_by_the_first_poll_that_misses_something(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: FLUSHALL. The sample that runs elsewhere is waited for, and not submitted again."""
    monkeypatch.setattr(results, "_STORE_RETRY_S", 0.001)
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await other.asample()).json["request_id"]
    bench.server.flush()
    poll = asyncio.create_task(bench.retrieve(promised))
    async with asyncio.timeout(DEADLINE_S):
        await bench.losses.wait()
    running = other.dispatcher.samples.get(KEY)
    assert running is not None
    await other.store.begin(KEY, running.claim)
    await bench.renew_lease()
    other.executor.finish(KEY)
    assert (await poll).status == 200
    await other.close()


async def test_a_worker_that_is_started_while_others_refill_waits_for_them(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: it has not seen the restart itself."""
    monkeypatch.setattr(results, "_STORE_RETRY_S", 0.001)
    bench.server.wipe()
    young = await AppBench(bench.server, OTHER_OWNER).open()
    assert not young.dispatcher.is_refilling(young.clock.monotonic_s())
    poll = asyncio.create_task(young.retrieve(request_id(5)))
    await asked_again(young)
    assert not poll.done()
    await bench.store.note_refill(bench.owner, window_s=2 * REFILL_S)
    young.clock.advance(REFILL_S)
    await asked_again(young)
    assert not poll.done()
    young.clock.advance(REFILL_S)
    assert (await poll).status == 410
    await young.close()


async def asked_again(bench: AppBench) -> None:
    """Until a held poll has looked some times more."""
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 6)


async def test_a_draining_worker_sends_held_polls_back(bench: AppBench) -> None:
    """B12"""
    promised = (await bench.asample()).json["request_id"]
    polls = [asyncio.create_task(bench.retrieve(promised)), asyncio.create_task(bench.poll_session())]
    await asleep(bench, 2)
    bench.waiters.send_back()
    retrieved, polled = await asyncio.gather(*polls)
    assert (retrieved.status, polled.status) == (408, 200)


async def test_a_poll_that_waited_on_this_worker_finds_the_real_owner(bench: AppBench) -> None:
    """The submission here turned out to be a duplicate of one that runs elsewhere."""
    other = await AppBench(bench.server, OTHER_OWNER).open()
    await other.asample()
    await bench.sessions.require_alive(SESSION_ID, ANONYMOUS)
    bench.store.gate = asyncio.Event()
    submission = asyncio.create_task(bench.asample())
    await until(lambda: KEY in bench.dispatcher.samples)
    poll = asyncio.create_task(bench.retrieve(request_id()))
    await asleep(bench)
    bench.store.gate.set()
    await submission
    other.executor.finish(KEY, Ending(State.READY, b"theirs"))
    assert (await poll).body == b"theirs"
    await other.close()


# -- cancel_future -------------------------------------------------------------------------------------------------


async def test_a_cancel_ends_a_sample_that_runs_here(bench: AppBench) -> None:
    """D7"""
    promised = (await bench.asample()).json["request_id"]
    await until(lambda: bench.executor.started)
    assert (await bench.post("/cancel_future", {"request_id": promised})).status == 200
    answered = await bench.retrieve(promised)
    assert answered.status == 200
    assert answered.json["category"] == "user"
    assert bench.executor.interrupted == [KEY]


async def test_a_cancel_reaches_the_worker_that_runs_it(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    await until(lambda: bench.executor.started)
    assert (await other.post("/cancel_future", {"request_id": promised})).status == 200
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED
    await other.close()


async def test_a_cancel_of_what_has_ended_changes_nothing(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, b"result"))
    for name in (finished, request_id(99)):
        assert (await bench.post("/cancel_future", {"request_id": name})).status == 200
    assert (await bench.retrieve(finished)).body == b"result"


async def test_a_cancel_while_the_store_is_away_is_sent_again(bench: AppBench) -> None:
    bench.store.fail_before = AWAY
    assert (await bench.post("/cancel_future", {"request_id": request_id()})).status == 429
