"""Executing one sample: attempts at upstreams until one succeeds or the retry policy says stop."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from shared.core import retry
from shared.core.faults import Fault, FaultClass, too_large
from shared.core.lifecycle import State
from shared.core.result import LARGEST_RESULT_BYTES
from shared.loop.turns import TurnLimit
from shared.wire import vllm
from shared.wire.sdk import result as proto
from workers.samples.live import Ending
from workers.samples.weight_changes import WeightNews

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.clock import Clock
    from shared.core.adapters import Adapter
    from shared.core.model import SampleSpec
    from shared.core.upstream_protocol import UpstreamProtocol
    from shared.counters import Counters
    from shared.wire.json_arrays import Body
    from workers.samples.live import LiveSample
    from workers.upstream.adapters import Adapters
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.pool import UpstreamPool
    from workers.upstream.upstream import Upstream

    MarkPaused = Callable[[LiveSample, bool], None]

T = TypeVar("T")

log = logging.getLogger(__name__)

# From here on a thread of its own does the work: decoding this much takes some 20 ms where there are top-k logprobs,
# and a loop that decodes hundreds of MiB is taken for hung, and killed with all its samples.
_LARGE_BYTES: Final = 512 * 1024
# Unless it is read in parts: so much takes two milliseconds, and a thread, with caches of its own, half of one more.
_LARGE_IN_PARTS_BYTES: Final = 3 * 1024 * 1024
# Two or three milliseconds of sending, and of decoding, storing and telling, of small ones. Requests and dials have
# their own share of a turn, and who waits for it feels the sum.
_EXCHANGES_PER_TURN: Final = 16


class Executor:
    def __init__(
        self,
        pool: UpstreamPool,
        adapters: Adapters,
        forwarder: Forwarder,
        counters: Counters,
        clock: Clock,
        policy: retry.Policy,
        rng_unit: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        mark_paused: MarkPaused | None = None,
    ) -> None:
        """`mark_paused` tells the polls of a sample that wait at other workers; the attempts do not wait for that."""
        self._pool = pool
        self._adapters = adapters
        self._forwarder = forwarder
        self._counters = counters
        self._clock = clock
        self._policy = policy
        self._rng_unit = rng_unit
        self._sleep = sleep
        self._mark_paused = mark_paused or _mark_nothing
        self.paused = 0
        self._turns = TurnLimit(_EXCHANGES_PER_TURN)
        self._weights = WeightNews(counters, clock)
        # One large one at a time: their threads share the interpreter with the loop.
        self._large = asyncio.Lock()

    async def execute(self, running: LiveSample) -> Ending:
        """The sample's ending. Cancelling closes the upstream connection."""
        budget = retry.UNUSED
        avoid: Upstream | None = None
        for attempt in range(1, 2**16):
            upstream, outcome = await self._attempt_somewhere(running, attempt, avoid)
            if not isinstance(outcome, Fault):
                return Ending(State.READY, outcome)
            avoid = upstream or avoid
            decision = self._judge(upstream, outcome, budget)
            _log_fault(running, upstream, outcome, attempt)
            if not isinstance(decision, retry.Wait):
                return _ending_of(decision)
            budget = decision.budget
            await self._paused(running, outcome.message, self._sleep(decision.delay_s))
        return Ending(State.ORPHANED)

    async def _attempt_somewhere(
        self, running: LiveSample, attempt: int, avoid: Upstream | None
    ) -> tuple[Upstream | None, bytes | Fault]:
        """Who was asked, if anybody was, and what came of it."""
        adapter = running.target.adapter
        if adapter is not None and (fault := await self._place(running, adapter)) is not None:
            return None, fault
        beyond = vllm.beyond_completions(running.spec)
        name, session_key = running.target.upstream_name, running.key.session_key
        upstream = self._pool.choose(name, avoid, session_key, generates=beyond is not None)
        if beyond is not None and (fault := self._pool.protocols.unable(upstream, beyond)) is not None:
            return None, fault
        outcome = await self._attempt(running, upstream, attempt, upstream.protocol)
        if isinstance(outcome, Fault) and outcome.generate_missing:
            outcome = self._pool.protocols.without_generate(upstream, outcome)
        elif isinstance(outcome, Fault) and beyond is None:
            other = self._pool.protocols.other(upstream, outcome)
            if other is not None:
                self._counters.failed_attempt(outcome.kind)
                outcome = await self._attempt(running, upstream, attempt, other)
        if adapter is not None and isinstance(outcome, Fault) and outcome.model_missing:
            outcome = self._adapters.lost(adapter, upstream, outcome)
        return upstream, outcome

    async def _place(self, running: LiveSample, adapter: Adapter) -> Fault | None:
        if self._adapters.ready(adapter):
            return None
        return await self._paused(running, f"{adapter.path} is being loaded", self._adapters.place(adapter))

    async def _attempt(
        self, running: LiveSample, upstream: Upstream, attempt: int, protocol: UpstreamProtocol
    ) -> bytes | Fault:
        """The encoded result, or why there is none."""
        target = running.target
        calls = vllm.plan_calls(running.spec, target.upstream_name, target.context_tokens, protocol)
        decoded: list[vllm.Decoded] = []
        # Those that an upstream has dropped come here all at once.
        key_digest = running.holding.digest
        if not self._turns.try_take():
            await self._turns.wait(key_digest)
        for call in calls:
            self._counters.attempts += 1
            upstream.sent += 1
            url = upstream.samples_url(call.protocol)
            headers = _headers(running, call, attempt)
            body = await self._forwarder.post(upstream, url, call.body, headers, key_digest)
            if isinstance(body, Fault):
                return body
            if not self._turns.try_take():
                await self._turns.wait(key_digest)
            if len(body) <= _LARGE_BYTES:
                reply = vllm.decode_reply(call, running.spec, body)
            else:
                reply = await self._decoded(call, running.spec, body)
            if isinstance(reply, Fault):
                return reply
            if reply.mixed:
                self._weights.changed(running, upstream, reply.mixed)
            decoded.append(reply)
        self._pool.completed(upstream)
        return await self._encoded(running, decoded)

    async def _decoded(self, call: vllm.UpstreamCall, spec: SampleSpec, body: Body) -> vllm.Decoded | Fault:
        """Of a large reply."""
        if len(body) > _LARGE_IN_PARTS_BYTES or not vllm.reads_in_parts(call, spec):
            return await self._aside(partial(vllm.decode_reply, call, spec, body))
        async with self._large:
            # One of them in each turn of the loop.
            await asyncio.sleep(0)
            return vllm.decode_reply(call, spec, body)

    async def _encoded(self, running: LiveSample, decoded: Sequence[vllm.Decoded]) -> bytes | Fault:
        result = vllm.combine(running.spec, decoded)
        size_bytes = result.size_bytes
        # A greedy sample has one sequence n times: a small reply can make a result of any size.
        if size_bytes > LARGEST_RESULT_BYTES:
            return too_large()
        self._counters.tokens_sampled += sum([len(sequence.tokens) for sequence in result.sequences]) // 4
        if size_bytes <= _LARGE_BYTES:
            return proto.encode_sample_response(result)
        return await self._aside(partial(proto.encode_sample_response, result))

    async def _aside(self, work: Callable[[], T]) -> T:
        """`work`, which is pure, and of which there is so much that it is done out of the loop's way."""
        async with self._large:
            worked = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(worked)
            finally:
                if not worked.done():
                    # Cancelled, and the thread goes on: the next must not run beside it.
                    await asyncio.wait([worked])

    def _judge(self, upstream: Upstream | None, fault: Fault, budget: retry.Budget) -> retry.Decision:
        # A sample that waits for its adapter, for example, has made no attempt.
        if upstream is not None:
            self._counters.failed_attempt(fault.kind)
            self._pool.failed(upstream, fault)
        decision = retry.decide(fault, budget, self._policy, self._clock.monotonic_s(), self._rng_unit())
        if isinstance(decision, retry.Wait) and fault.kind is not FaultClass.NEVER_EXECUTED:
            self._counters.reexecutions += 1
        return decision

    async def _paused(self, running: LiveSample, reason: str, wait: Awaitable[T]) -> T:
        """What `wait` comes to; meanwhile polls tell `reason`."""
        running.paused_reason = reason
        self.paused += 1
        self._mark_paused(running, True)
        try:
            result = await wait
        finally:
            running.paused_reason = None
            self.paused -= 1
        self._mark_paused(running, False)
        return result


def _mark_nothing(running: LiveSample, paused: bool) -> None:
    pass


def _log_fault(running: LiveSample, upstream: Upstream | None, fault: Fault, attempt: int) -> None:
    """Without the upstream's words: they may quote the prompt."""
    if log.isEnabledFor(logging.DEBUG):
        asked = upstream.url if upstream is not None else None
        fields = {"request_id": running.request_id, "attempt": attempt, "upstream": asked}
        log.debug("attempt failed" if asked else "nobody was asked", extra={**fields, "class": fault.kind.value})


def _headers(running: LiveSample, call: vllm.UpstreamCall, attempt: int) -> dict[str, str]:
    """What lets an operator find the request in the upstream's log, and a router pin the session."""
    # The scores of the prompt are a request of their own, not a second execution of the sample.
    suffix = "" if call.sequences else "-scores"
    headers = {
        "X-Request-Id": f"{running.request_id}{suffix}-a{attempt}",
        "X-Session-ID": running.session.sampling_session_id,
    }
    if running.trace is not None:
        headers["traceparent"] = running.trace
    return headers


def _ending_of(decision: retry.Fail | retry.Orphan) -> Ending:
    return Ending.failed(decision.failure) if isinstance(decision, retry.Fail) else Ending(State.ORPHANED)
