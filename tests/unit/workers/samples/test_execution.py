"""Attempts until one succeeds or the policy says stop: what is sent, in which order, and what is counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from shared.core import ids
from shared.core.faults import Fault, FaultClass, classify_reply
from shared.core.lifecycle import State
from shared.core.model import SamplingParams
from shared.log import JsonFormatter
from shared.wire import vllm
from shared.wire.sdk import result as proto
from tests.execution_bench import ABORTED, BUSY, CUT, REFUSED, RESET, TRACE, Bench, faults_of
from tests.waiting import DEADLINE_S
from tests.worker_bench import session, spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


async def test_a_result_is_encoded_and_counted() -> None:
    bench = Bench()
    state, payload = await bench.execute(spec(n=2))
    result = proto.decode_sample_response(payload)
    assert state is State.READY
    assert [len(sequence.tokens) for sequence in result.sequences] == [16, 16]
    assert bench.counters.tokens_sampled == 8
    assert bench.counters.attempts == 1
    assert bench.counters.reexecutions == 0
    assert bench.forwarder.key_digests == [b"K"], "it waits in its key's turn (E4)"


@pytest.mark.parametrize(("n", "state"), [(4, State.READY), (5, State.FAILED)])
async def test_a_greedy_result_too_large_to_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, n: int, state: State
) -> None:
    """Each copy has 4 tokens and logprobs of 4 bytes; a result that Redis cannot take would be written for ever."""
    monkeypatch.setattr("workers.samples.execution.LARGEST_RESULT_BYTES", 4 * 32)
    ended, payload = await Bench().execute(spec(n=n, params=SamplingParams(max_tokens=4, temperature=0.0)))
    assert ended is state
    if state is State.FAILED:
        assert json.loads(payload)["category"] == "user"
        assert "fewer samples" in json.loads(payload)["error"]


@pytest.mark.parametrize(
    ("large_bytes", "in_parts_bytes", "topk", "aside"),
    [
        (0, 0, 0, [True, True]),
        (0, 2**20, 0, [False, True]),
        # There is no top-k in the reply: it comes to nothing.
        (0, 2**20, 2, [True]),
        (2**20, 2**20, 0, [False, False]),
    ],
)
async def test_much_is_decoded_and_encoded_out_of_the_loops_way(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int, in_parts_bytes: int, topk: int, aside: list[bool]
) -> None:
    """A loop that decodes for seconds is taken for hung, and killed with everybody's samples."""
    threads: list[threading.Thread] = []

    def noted(work: Callable[..., Any], *args: Any) -> Any:
        threads.append(threading.current_thread())
        return work(*args)

    monkeypatch.setattr("workers.samples.execution._LARGE_BYTES", large_bytes)
    monkeypatch.setattr("workers.samples.execution._LARGE_IN_PARTS_BYTES", in_parts_bytes)
    monkeypatch.setattr("workers.samples.execution.vllm.decode_reply", partial(noted, vllm.decode_reply))
    monkeypatch.setattr(
        "workers.samples.execution.proto.encode_sample_response", partial(noted, proto.encode_sample_response)
    )
    state, _ = await Bench().execute(spec(topk_sample_logprobs=topk))
    assert topk or state is State.READY
    assert [thread is not threading.main_thread() for thread in threads] == aside


async def test_of_large_ones_the_loop_decodes_one_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    decoded_in: list[int] = []
    monkeypatch.setattr("workers.samples.execution.vllm.decode_reply", lambda *_: decoded_in.append(len(turns)))
    call, executor = vllm.plan_calls(spec(), "tiny", 100)[0], Bench().executor
    tasks = [asyncio.create_task(executor._decode_large(call, spec(), b"")) for _ in range(4)]
    while not all(task.done() for task in tasks):
        turns.append(len(turns))
        await asyncio.sleep(0)
    assert len(set(decoded_in)) == 4


async def test_an_attempt_tells_which_sample_and_which_session_it_is() -> None:
    bench = Bench(BUSY)
    await bench.execute()
    request_id = ids.request_id(session(), 3)
    assert [headers["X-Request-Id"] for headers in bench.forwarder.headers] == [f"{request_id}-a1", f"{request_id}-a2"]
    assert {headers["X-Session-ID"] for headers in bench.forwarder.headers} == {session().sampling_session_id}


async def test_the_callers_trace_context_goes_upstream_with_every_attempt() -> None:
    bench = Bench(None)
    await bench.execute()
    assert "traceparent" not in bench.forwarder.headers[0]
    bench = Bench(RESET, None)
    await bench.execute(trace=TRACE)
    assert [headers["traceparent"] for headers in bench.forwarder.headers] == [TRACE, TRACE]


async def test_a_failed_attempt_is_a_line_of_the_debug_level_only(caplog: pytest.LogCaptureFixture) -> None:
    """A line names the sample and the attempt, and never the upstream's words: they may quote the prompt."""
    caplog.set_level(logging.INFO)
    await Bench(RESET, None).execute()
    assert not caplog.records
    caplog.set_level(logging.DEBUG)
    bench = Bench(RESET, None)
    await bench.execute()
    (record,) = [record for record in caplog.records if record.name == "workers.samples.execution"]
    line = JsonFormatter({"slot": 3}).format(record)
    fields = json.loads(line)
    request_id = bench.sample.request_id
    assert (fields["request_id"], fields["slot"], fields["attempt"]) == (request_id, 3, 1)
    assert (fields["class"], fields["upstream"]) == ("interrupted", "http://a")
    assert RESET.message not in line


async def test_scores_of_the_prompt_are_asked_apart_where_there_are_several_choices() -> None:
    bench = Bench()
    _, payload = await bench.execute(spec(n=2, prompt_logprobs=True))
    assert [(asked["n"], asked["max_tokens"]) for asked in bench.forwarder.asked] == [(1, 1), (2, 4)]
    names = [headers["X-Request-Id"] for headers in bench.forwarder.headers]
    assert names[0].endswith("-scores-a1")
    assert not names[1].endswith("-scores-a1")
    result = proto.decode_sample_response(payload)
    assert result.prompt is not None
    assert len(result.sequences) == 2


async def test_a_fault_of_the_second_request_repeats_the_attempt() -> None:
    bench = Bench(None, RESET)
    state, _ = await bench.execute(spec(n=2, prompt_logprobs=True))
    assert state is State.READY
    assert bench.attempts == ["a1", "a1", "a2", "a2"]
    assert bench.counters.reexecutions == 1


@pytest.mark.parametrize(
    ("faults", "policy", "state", "attempts", "reexecutions"),
    [
        ([BUSY] * 9, {}, State.READY, 10, 0),
        ([RESET], {}, State.READY, 2, 1),
        ([RESET, RESET], {}, State.ORPHANED, 2, 1),
        ([RESET, BUSY, RESET], {}, State.ORPHANED, 3, 1),
        ([RESET, RESET], {"max_reexecutions": 2}, State.READY, 3, 2),
        ([RESET], {"max_reexecutions": 0}, State.ORPHANED, 1, 0),
        ([ABORTED] * 16, {}, State.READY, 17, 16),
        ([ABORTED] * 17, {}, State.ORPHANED, 17, 16),
        ([CUT], {}, State.FAILED, 1, 0),
        ([CUT], {"retry_ambiguous": True}, State.READY, 2, 1),
        ([Fault(FaultClass.REFUSED, "no")], {"retry_ambiguous": True}, State.FAILED, 1, 0),
    ],
)
async def test_what_is_done_about_faults(
    faults: list[Fault], policy: dict[str, Any], state: State, attempts: int, reexecutions: int
) -> None:
    """D9, D16, D17: what was never executed waits, what may have run runs again a bounded number of times."""
    bench = Bench(*faults, **policy)
    ended, _ = await bench.execute()
    assert ended is state
    assert bench.counters.attempts == len(bench.forwarder.asked) == attempts
    assert bench.counters.reexecutions == reexecutions


async def test_faults_are_counted_by_their_class() -> None:
    bench = Bench(BUSY, RESET, ABORTED, CUT)
    await bench.execute()
    expected = {"never_executed": 1, "interrupted": 1, "aborted": 1, "ambiguous": 1}
    assert faults_of(bench) == expected


@pytest.mark.parametrize(("status", "failures"), [(400, 0), (404, 0), (403, 1), (500, 1)])
async def test_the_clients_own_mistake_is_no_failure_of_the_upstream(status: int, failures: int) -> None:
    bench = Bench(classify_reply(status, b'{"error": {"message": "no"}}', {}))
    await bench.execute()
    (upstream,) = bench.pool.statuses()
    assert (upstream.attempts, upstream.faults) == (1, failures)


async def test_what_no_upstream_takes_fails_when_the_wait_is_over() -> None:
    """A15, D8: and not before."""
    bench = Bench(*[BUSY] * 500, upstream_wait_s=60.0)
    state, payload = await bench.execute()
    assert state is State.FAILED
    assert sum(bench.slept_s) == pytest.approx(60.0)
    assert json.loads(payload) == {
        "error": "no upstream took it for 60 s; upstream answered 503: busy",
        "category": "server",
    }


async def test_polls_are_told_why_it_waits_and_only_while_it_does() -> None:
    """D8: queue_state paused_capacity"""
    bench = Bench(BUSY)
    await bench.execute()
    assert bench.paused == [BUSY.message]
    assert bench.marks == [True, False]
    assert bench.sample.paused_reason is None


async def test_a_cancelled_pause_leaves_no_reason_behind() -> None:
    bench = Bench(BUSY)

    async def cancelled(_: float) -> None:
        raise asyncio.CancelledError

    bench.executor._sleep = cancelled
    with pytest.raises(asyncio.CancelledError):
        await bench.execute()
    assert bench.sample.paused_reason is None


async def test_another_upstream_is_asked_after_a_fault() -> None:
    bench = Bench(BUSY, BUSY, urls=("http://a", "http://b"))
    await bench.execute()
    assert bench.forwarder.upstreams == ["http://a", "http://b", "http://a"]


async def test_a_broken_upstream_rests_and_a_busy_one_does_not() -> None:
    for fault, state in ((REFUSED, "resting"), (RESET, "resting"), (BUSY, "up"), (ABORTED, "up")):
        bench = Bench(fault, urls=("http://a", "http://b"))
        await bench.execute()
        assert bench.pool.statuses()[0].state == state, fault


async def test_a_success_ends_the_rest() -> None:
    bench = Bench(REFUSED)
    await bench.execute()
    (status,) = bench.pool.statuses()
    assert (status.state, status.failures) == ("up", 0)


async def test_a_reply_that_is_no_result_is_a_fault_that_names_what_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """D14"""
    bench = Bench()

    async def nothing(*_: object) -> bytes:
        return b'{"choices": []}'

    monkeypatch.setattr(bench.forwarder, "post", nothing)
    state, payload = await bench.execute()
    assert state is State.FAILED
    assert "0 choices" in json.loads(payload)["error"]


async def test_a_large_one_that_is_cancelled_ends_before_the_next_begins() -> None:
    """A thread cannot be interrupted, and each holds a body."""
    executor = Bench().executor
    begun, goes_on, at_once, most = threading.Event(), threading.Event(), [0], [0]

    def work() -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        at_once[0] -= 1

    first = asyncio.create_task(executor._aside(work))
    await asyncio.to_thread(begun.wait, DEADLINE_S)
    first.cancel()
    second = asyncio.create_task(executor._aside(work))
    begun.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not begun.is_set()
    goes_on.set()
    await second
    assert first.cancelled()
    assert most == [1]
