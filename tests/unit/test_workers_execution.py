"""Attempts until one succeeds or the policy says stop: what is sent, in which order, and what is counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from shared.clock import ManualClock
from shared.core import ids, retry
from shared.core.adapters import Adapter
from shared.core.faults import BreakKind, Fault, FaultClass, classify_break, classify_reply, too_large
from shared.core.lifecycle import State
from shared.core.model import Category, SamplingParams
from shared.core.record import Claim
from shared.core.upstream_protocol import ProtocolChoice, UpstreamProtocol
from shared.counters import Counters
from shared.log import JsonFormatter
from shared.wire import proto, vllm
from tests.waiting import DEADLINE_S
from tests.worker_bench import OWNER, TARGET, session, spec
from workers.execution import Executor
from workers.models import Catalogue, Target
from workers.pool import UpstreamPool
from workers.running import Running
from workers.tenants import Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from yarl import URL

    from shared.core.model import SampleSpec
    from workers.upstreams import Upstream

BUSY = Fault(FaultClass.NEVER_EXECUTED, "upstream answered 503: busy")
REFUSED = classify_break(BreakKind.CONNECT_REFUSED, "http://a")
RESET = classify_break(BreakKind.RESET_BEFORE_STATUS, "http://a")
CUT = classify_break(BreakKind.BODY_CUT, "http://a")
MISSING = Fault(FaultClass.NEVER_EXECUTED, "adapter tinker://r/c: no files", Category.USER, wait_s=60.0)
ADAPTER = Adapter("tinker://r/c", "r--c", "/adapters/r/c")
LARGE_BYTES = 2**30
ABORTED = Fault(FaultClass.ABORTED, "aborted after 3 tokens")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def answer(asked: dict[str, Any]) -> bytes:
    """A right reply to a request, small: `logprobs` all -1."""
    if "token_ids" in asked:
        return generation(asked)
    tokens = [5] * asked["max_tokens"]
    scores: list[Any] = [None, *({str(token): {"logprob": -2.0}} for token in asked["prompt"][1:])]
    choice = {
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_logprobs": scores if "prompt_logprobs" in asked else None,
    }
    choices = [{**choice, "index": index} for index in range(asked["n"])]
    return json.dumps({"choices": choices, "usage": {"prompt_tokens_details": None}}).encode()


def generation(asked: dict[str, Any], versions: Sequence[str] = ("default",)) -> bytes:
    """The same of a generation, with one token or more by each of the `versions` of the weights."""
    params = asked["sampling_params"]
    place = {"token_id": 5, "logprob": -1.0, "top_logprobs": []}
    tokens = max(params["max_tokens"], len(versions))
    spans = [{"version": version, "start": n, "end": n + 1} for n, version in enumerate(versions)]
    choice = {
        "finish_reason": "length",
        "token_ids": [5] * tokens,
        "weight_versions": spans,
        "logprobs": {"content": [place] * tokens},
    }
    rows: list[Any] = [None, *({str(token): {"logprob": -2.0}} for token in asked["token_ids"][1:])]
    scores = rows if "prompt_logprobs" in params else None
    choices = [{**choice, "index": index} for index in range(params["n"])]
    return json.dumps({"choices": choices, "usage": None, "prompt_logprobs": scores}).encode()


class FakeForwarder:
    """Meets requests with the faults of a script, then answers rightly."""

    def __init__(self, faults: Sequence[Fault | None] = ()) -> None:
        self.faults = list(faults)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.upstreams: list[str] = []
        self.paths: list[str] = []
        self.versions: Sequence[str] = ("default",)
        self.parties: list[bytes] = []

    async def post(
        self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str], party: bytes
    ) -> bytes | Fault:
        self.parties.append(party)
        self.asked.append(json.loads(body))
        self.paths.append(url.path)
        self.headers.append(headers)
        self.upstreams.append(upstream.url)
        fault = self.faults.pop(0) if self.faults else None
        if fault is None and len(self.versions) > 1:
            return generation(self.asked[-1], self.versions)
        return fault or answer(self.asked[-1])

    async def ask(self, upstream: Upstream, *_: object) -> tuple[int, bytes]:
        """It has /inference/v1/generate."""
        return 400, b""


class FakeAdapters:
    """Refuses to place an adapter as a script says, then has it."""

    def __init__(self) -> None:
        self.faults: list[Fault | None] = []
        self.lost_at: list[str] = []

    def ready(self, adapter: Adapter) -> bool:
        return not self.faults

    async def place(self, adapter: Adapter) -> Fault | None:
        await asyncio.sleep(0)
        return self.faults.pop(0)

    def lost(self, adapter: Adapter, upstream: Upstream, fault: Fault) -> Fault:
        self.lost_at.append(upstream.url)
        return MISSING


class Bench:
    def __init__(
        self,
        *faults: Fault | None,
        urls: Sequence[str] = ("http://a",),
        protocol: ProtocolChoice = ProtocolChoice.COMPLETIONS,
        **policy: Any,
    ) -> None:
        self.clock = ManualClock()
        self.forwarder = FakeForwarder(faults)
        self.counters = Counters()
        self.slept_s: list[float] = []
        self.paused: list[str | None] = []
        self.marks: list[bool] = []
        forwarder: Any = self.forwarder
        self.pool = UpstreamPool(urls, forwarder, Catalogue((), ""), self.clock, protocol=protocol)
        self.adapters = FakeAdapters()
        self.executor = Executor(
            self.pool,
            self.adapters,  # type: ignore[arg-type] # three of its methods are asked for
            self.forwarder,  # type: ignore[arg-type] # all that is asked of it is `post`
            self.counters,
            self.clock,
            retry.Policy(**policy),
            rng_unit=lambda: 0.0,
            sleep=self._sleep,
            mark_paused=self._mark_paused,
        )

    async def _sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.paused.append(self.running.paused_reason)
        self.clock.advance(delay_s)
        await asyncio.sleep(0)

    def _mark_paused(self, running: Running, paused: bool) -> None:
        assert running is self.running
        self.marks.append(paused)

    async def execute(
        self, wanted: SampleSpec | None = None, trace: str | None = None, target: Target = TARGET
    ) -> tuple[State, bytes]:
        wanted = wanted or spec()
        claim = Claim(OWNER, 1, wanted.num_samples, wanted.digest)
        self.running = Running(session(), session().key(3), wanted, claim, target, 0, Holding(b"K"))
        self.running.trace = trace
        ending = await self.executor.execute(self.running)
        return ending.state, ending.payload

    @property
    def attempts(self) -> list[str]:
        return [headers["X-Request-Id"].rpartition("-")[2] for headers in self.forwarder.headers]


async def test_a_result_is_encoded_and_counted() -> None:
    bench = Bench()
    state, payload = await bench.execute(spec(n=2))
    result = proto.decode_sample_response(payload)
    assert state is State.READY
    assert [len(sequence.tokens) for sequence in result.sequences] == [16, 16]
    assert bench.counters.tokens_sampled == 8
    assert bench.counters.attempts == 1
    assert bench.counters.reexecutions == 0
    assert bench.forwarder.parties == [b"K"], "it waits in its key's turn (E4)"


@pytest.mark.parametrize(("n", "state"), [(4, State.READY), (5, State.FAILED)])
async def test_a_greedy_result_too_large_to_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, n: int, state: State
) -> None:
    """Each copy has 4 tokens and logprobs of 4 bytes; a result that Redis cannot take would be written for ever."""
    monkeypatch.setattr("workers.execution.LARGEST_RESULT_BYTES", 4 * 32)
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

    monkeypatch.setattr("workers.execution._LARGE_BYTES", large_bytes)
    monkeypatch.setattr("workers.execution._LARGE_IN_PARTS_BYTES", in_parts_bytes)
    monkeypatch.setattr("workers.execution.vllm.decode_reply", partial(noted, vllm.decode_reply))
    monkeypatch.setattr("workers.execution.proto.encode_sample_response", partial(noted, proto.encode_sample_response))
    state, _ = await Bench().execute(spec(topk_sample_logprobs=topk))
    assert topk or state is State.READY
    assert [thread is not threading.main_thread() for thread in threads] == aside


async def test_of_large_ones_the_loop_decodes_one_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    decoded_in: list[int] = []
    monkeypatch.setattr("workers.execution.vllm.decode_reply", lambda *_: decoded_in.append(len(turns)))
    call, executor = vllm.plan_calls(spec(), "tiny", 100)[0], Bench().executor
    tasks = [asyncio.create_task(executor._decoded(call, spec(), b"")) for _ in range(4)]
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
    (record,) = [record for record in caplog.records if record.name == "workers.execution"]
    line = JsonFormatter({"slot": 3}).format(record)
    told = json.loads(line)
    request_id = bench.running.request_id
    assert (told["request_id"], told["slot"], told["attempt"]) == (request_id, 3, 1)
    assert (told["class"], told["upstream"]) == ("interrupted", "http://a")
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


def faults_of(bench: Bench) -> dict[str, int]:
    """How often by class; those that were."""
    counts = bench.counters.snapshot().items()
    return {name.removeprefix("faults_"): count for name, count in counts if name.startswith("faults_") and count}


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
    assert bench.running.paused_reason is None


async def test_a_cancelled_pause_leaves_no_reason_behind() -> None:
    bench = Bench(BUSY)

    async def cancelled(_: float) -> None:
        raise asyncio.CancelledError

    bench.executor._sleep = cancelled
    with pytest.raises(asyncio.CancelledError):
        await bench.execute()
    assert bench.running.paused_reason is None


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


# -- adapters ---------------------------------------------------------------------------------------------------------

ADAPTED = Target(ADAPTER.name, "sim/tiny", 4096, ADAPTER)


async def test_a_sample_waits_until_its_adapter_is_placed_and_says_so() -> None:
    bench = Bench()
    bench.adapters.faults = [MISSING, BUSY, None]
    state, _ = await bench.execute(target=ADAPTED)
    assert state is State.READY
    assert bench.paused == [MISSING.message, BUSY.message]
    assert bench.marks == [True, False] * 5
    assert [asked["model"] for asked in bench.forwarder.asked] == ["r--c"]
    assert bench.counters.reexecutions == 0


async def test_an_adapter_that_never_comes_fails_the_sample_in_its_own_time() -> None:
    bench = Bench()
    bench.adapters.faults = [MISSING] * 500
    state, payload = await bench.execute(target=ADAPTED)
    assert state is State.FAILED
    assert sum(bench.slept_s) == pytest.approx(60.0)
    assert json.loads(payload) == {
        "error": "no upstream took it for 60 s; adapter tinker://r/c: no files",
        "category": "user",
    }
    assert bench.forwarder.asked == []


async def test_waiting_for_an_adapter_is_no_failed_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """No upstream was asked for the sample, so none has failed; once one is asked, what it says counts."""
    caplog.set_level(logging.DEBUG, "workers.execution")
    bench = Bench(BUSY)
    bench.adapters.faults = [MISSING, MISSING, None]
    assert (await bench.execute(target=ADAPTED))[0] is State.READY
    assert faults_of(bench) == {"never_executed": 1}
    assert bench.counters.attempts == 2
    assert [record.message for record in caplog.records] == ["nobody was asked"] * 2 + ["attempt failed"]


async def test_an_upstream_that_lost_an_adapter_is_no_end_for_the_sample() -> None:
    """It was restarted: the adapter is placed again."""
    refused = Fault(FaultClass.REFUSED, "upstream answered 404: no such model", Category.USER, model_missing=True)
    bench = Bench(refused)
    assert (await bench.execute(target=ADAPTED))[0] is State.READY
    assert bench.adapters.lost_at == ["http://a"]
    bench = Bench(refused)
    assert (await bench.execute())[0] is State.FAILED
    assert bench.adapters.lost_at == []


# -- by /inference/v1/generate ----------------------------------------------------------------------------------------

GENERATE = "/inference/v1/generate"
LONG_STOP = SamplingParams(max_tokens=4, stop=("a", "b", "c", "d", "e"))


async def test_a_generation_ends_as_a_completion_does() -> None:
    """D15: prompt logprobs of several sequences are asked for apart, once, by either protocol."""
    ends = []
    for choice in (ProtocolChoice.COMPLETIONS, ProtocolChoice.GENERATE):
        bench = Bench(BUSY, RESET, protocol=choice)
        ends.append(await bench.execute(spec(n=2, prompt_logprobs=True)))
        assert bench.attempts == ["a1", "a2", "a3", "a3"]
        assert (bench.counters.tokens_sampled, bench.counters.reexecutions) == (8, 1)
    assert bench.forwarder.paths == [GENERATE] * 4
    assert ends[0] == ends[1]
    assert ends[0][0] is State.READY


async def test_an_endpoint_that_is_gone_sends_the_sample_to_the_other() -> None:
    missing = classify_reply(403, b"", {}, UpstreamProtocol.GENERATE)
    bench = Bench(missing, protocol=ProtocolChoice.AUTO)
    upstream = bench.pool.choose("tiny")
    await bench.pool.protocols.learn(upstream)
    state, _ = await bench.execute()
    assert state is State.READY
    assert bench.forwarder.paths == [GENERATE, "/v1/completions"]
    assert (bench.counters.faults_never_executed, bench.counters.reexecutions) == (1, 0)
    assert not upstream.failures


async def test_an_endpoint_that_is_not_there_where_it_was_chosen_is_final() -> None:
    bench = Bench(classify_reply(404, b"", {}, UpstreamProtocol.GENERATE), protocol=ProtocolChoice.GENERATE)
    state, payload = await bench.execute()
    assert state is State.FAILED
    assert json.loads(payload)["category"] == "server"
    assert "--enable-scale-out" in json.loads(payload)["error"]


async def test_what_nobody_can_be_asked_is_never_sent() -> None:
    """It was taken while an upstream might have had the endpoint, and then none had."""
    bench = Bench()
    state, payload = await bench.execute(spec(params=LONG_STOP))
    assert state is State.FAILED
    assert json.loads(payload)["category"] == "user"
    assert "--upstream-protocol" in json.loads(payload)["error"]
    assert not bench.forwarder.asked
    assert faults_of(bench) == {}


async def test_a_long_stop_list_is_sent_whole() -> None:
    bench = Bench(protocol=ProtocolChoice.GENERATE)
    assert (await bench.execute(spec(params=LONG_STOP)))[0] is State.READY
    assert bench.forwarder.asked[0]["sampling_params"]["stop"] == ["a", "b", "c", "d", "e"]


async def test_weights_that_change_under_a_generation_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(protocol=ProtocolChoice.GENERATE)
    bench.forwarder.versions = ("step-7", "step-8")
    with caplog.at_level(logging.WARNING):
        state, _ = await bench.execute(spec(n=3))
    assert state is State.READY
    assert bench.counters.mixed_weights == 3
    (told,) = [vars(record) for record in caplog.records if "weights changed" in record.message]
    assert (told["versions"], told["sequences"], told["upstream"]) == (["step-7", "step-8"], 3, "http://a")
    assert told["request_id"] == bench.running.request_id


TOO_MANY = classify_reply(400, b'{"error":{"message":"n must be at most 256"}}', {}, UpstreamProtocol.GENERATE)


@pytest.mark.parametrize("second", [None, classify_reply(400, b'{"error":{"message":"n is wrong"}}', {})])
async def test_what_only_generations_refuse_is_asked_by_the_other_endpoint(second: Fault | None) -> None:
    """Found out, not chosen: nobody has asked for the narrower bounds. The second word is the last."""
    bench = Bench(TOO_MANY, second, protocol=ProtocolChoice.AUTO)
    await bench.pool.protocols.learn(bench.pool.choose("tiny"))
    state, payload = await bench.execute(spec(n=3))
    assert state is (State.READY if second is None else State.FAILED)
    assert bench.forwarder.paths == [GENERATE, "/v1/completions"]
    assert bench.attempts == ["a1", "a1"]
    assert (bench.counters.attempts, bench.counters.faults_refused) == (2, 1 if second is None else 2)
    assert not bench.slept_s
    if second is not None:
        assert json.loads(payload) == {"error": "upstream answered 400: n is wrong", "category": "user"}


@pytest.mark.parametrize(
    ("choice", "params", "fault"),
    [
        (ProtocolChoice.GENERATE, SamplingParams(max_tokens=4), TOO_MANY),
        (ProtocolChoice.AUTO, LONG_STOP, TOO_MANY),
        # Larger than any result may be: it has run.
        (ProtocolChoice.AUTO, SamplingParams(max_tokens=4), too_large()),
        (ProtocolChoice.AUTO, SamplingParams(max_tokens=4), classify_reply(413, b"", {}, UpstreamProtocol.GENERATE)),
    ],
)
async def test_other_refusals_of_generations_are_final(
    choice: ProtocolChoice, params: SamplingParams, fault: Fault
) -> None:
    bench = Bench(fault, protocol=choice)
    await bench.pool.protocols.learn(bench.pool.choose("tiny"))
    assert (await bench.execute(spec(params=params)))[0] is State.FAILED
    assert bench.forwarder.paths == [GENERATE]


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
