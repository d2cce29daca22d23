"""Execute a sample: make attempts at upstreams until one succeeds or the retry policy ends them."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from shared.core import retry
from shared.core.faults import Fault, FaultClass, too_large
from shared.core.lifecycle import State
from shared.core.result import LARGEST_RESULT_BYTES
from shared.log import Throttle
from shared.loop.turns import TurnLimit
from shared.wire import vllm
from shared.wire.sdk import result as proto
from workers.samples.live import Ending
from workers.upstream.client.port import Exchange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.clock import Clock
    from shared.core.model import SampleSpec
    from shared.core.upstream_protocol import UpstreamProtocol
    from shared.counters import Counters
    from shared.store.contract import Store
    from shared.wire.json_arrays import Body
    from workers.samples.live import LiveSample
    from workers.upstream.adapters import Adapters
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.pool import UpstreamPool
    from workers.upstream.upstream import Upstream

T = TypeVar("T")

log = logging.getLogger(__name__)

# Above this size a thread of its own does the work. Decoding this much takes some 20 ms where there are top-k logprobs,
# and a loop that decodes hundreds of MiB is taken for hung, and killed with all its samples.
_LARGE_BYTES: Final = 512 * 1024
# The limit for replies that are read in parts: this much takes two milliseconds on the loop, and half a millisecond
# more in a thread, whose caches are cold.
_LARGE_IN_PARTS_BYTES: Final = 3 * 1024 * 1024
# Two or three milliseconds of sending, and of decoding, storing and announcing small replies. Requests and dials have
# their own share of a turn, and a client that waits feels the sum.
_EXCHANGES_PER_TURN: Final = 16
_LOG_WEIGHTS_EVERY_S: Final = 30.0


class Executor:
    """Execute samples at the upstreams. `paused` counts the samples that wait until an upstream takes them."""

    def __init__(
        self,
        pool: UpstreamPool,
        adapters: Adapters,
        forwarder: Forwarder,
        store: Store,
        counters: Counters,
        clock: Clock,
        policy: retry.Policy,
        rng_unit: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pool = pool
        self._adapters = adapters
        self._forwarder = forwarder
        self._store = store
        self._counters = counters
        self._clock = clock
        self._policy = policy
        self._rng_unit = rng_unit
        self._sleep = sleep
        self.paused = 0
        self._turns = TurnLimit(_EXCHANGES_PER_TURN)
        self._weight_logs = Throttle(_LOG_WEIGHTS_EVERY_S)
        # One large reply at a time: their threads share the interpreter with the loop.
        self._large = asyncio.Lock()

    async def execute(self, sample: LiveSample) -> Ending:
        """Return the ending of this sample. Cancelling closes the upstream connection."""
        budget = retry.UNUSED
        avoid: Upstream | None = None
        for attempt in range(1, 2**16):
            upstream, outcome = await self._attempt_somewhere(sample, attempt, avoid)
            if not isinstance(outcome, Fault):
                return Ending(State.READY, outcome)
            avoid = upstream or avoid
            decision = self._judge(upstream, outcome, budget)
            if log.isEnabledFor(logging.DEBUG):
                # Without the upstream's words, which may quote the prompt.
                asked = upstream.url if upstream is not None else None
                fields = {"request_id": sample.request_id, "attempt": attempt, "upstream": asked}
                text = "attempt failed" if asked else "nobody was asked"
                log.debug(text, extra={**fields, "class": outcome.kind.value})
            if isinstance(decision, retry.Fail):
                return Ending.failed(decision.failure)
            if isinstance(decision, retry.Orphan):
                return Ending(State.ORPHANED)
            budget = decision.budget
            await self._paused(sample, outcome.message, self._sleep(decision.delay_s))
        return Ending(State.ORPHANED)

    async def _attempt_somewhere(
        self, sample: LiveSample, attempt: int, avoid: Upstream | None
    ) -> tuple[Upstream | None, bytes | Fault]:
        """Make one attempt, and return the upstream that was asked, if any was, and the outcome."""
        adapter = sample.target.adapter
        if adapter is not None and not self._adapters.ready(adapter):
            loading = self._adapters.place(adapter)
            if (fault := await self._paused(sample, f"{adapter.path} is being loaded", loading)) is not None:
                return None, fault
        beyond = vllm.beyond_completions(sample.spec)
        name, session_key = sample.target.upstream_name, sample.key.session_key
        upstream = self._pool.choose(name, avoid, session_key, generates=beyond is not None)
        if beyond is not None and (fault := self._pool.protocols.unable(upstream, beyond)) is not None:
            return None, fault
        outcome = await self._attempt(sample, upstream, attempt, upstream.protocol)
        if isinstance(outcome, Fault) and outcome.generate_missing:
            outcome = self._pool.protocols.without_generate(upstream, outcome)
        elif isinstance(outcome, Fault) and beyond is None:
            other = self._pool.protocols.other(upstream, outcome)
            if other is not None:
                self._counters.failed_attempt(outcome.kind)
                outcome = await self._attempt(sample, upstream, attempt, other)
        if adapter is not None and isinstance(outcome, Fault) and outcome.model_missing:
            outcome = self._adapters.lost(adapter, upstream, outcome)
        return upstream, outcome

    async def _attempt(
        self, sample: LiveSample, upstream: Upstream, attempt: int, protocol: UpstreamProtocol
    ) -> bytes | Fault:
        """Ask this upstream, and return the encoded result, or the fault."""
        target = sample.target
        calls = vllm.plan_calls(sample.spec, target.upstream_name, target.context_tokens, protocol)
        decoded: list[vllm.Decoded] = []
        # When an upstream drops its connections, all their samples come here at once.
        key_digest = sample.holding.digest
        if not self._turns.try_take():
            await self._turns.wait(key_digest)
        for call in calls:
            self._counters.attempts += 1
            upstream.sent += 1
            url = upstream.samples_urls[call.protocol]
            headers = _headers(sample, call, attempt)
            refusal = partial(vllm.why_not_ours, request_id=headers["X-Request-Id"], spec=sample.spec)
            exchange = Exchange(self._clock.monotonic_s, key_digest, refusal)
            body = await self._forwarder.post(upstream, url, call.body, headers, exchange)
            if isinstance(body, Fault):
                return body
            if not self._turns.try_take():
                await self._turns.wait(key_digest)
            if len(body) <= _LARGE_BYTES:
                reply = vllm.decode_reply(call, sample.spec, body)
            else:
                reply = await self._decode_large(call, sample.spec, body)
            if isinstance(reply, Fault):
                if reply.kind is FaultClass.WRONG_REPLY:
                    exchange.distrust()
                return reply
            if reply.mixed:
                self._note_mixed_weights(sample, upstream, reply.mixed)
            decoded.append(reply)
        upstream.succeeded(self._clock.monotonic_s())
        return await self._encode(sample, decoded)

    def _note_mixed_weights(self, sample: LiveSample, upstream: Upstream, mixed: Sequence[tuple[str, ...]]) -> None:
        """Count and log that an upstream's weights changed in the middle of a generation.

        The tokens and logprobs are then those of two policies, which a client that trains on them should know; the
        SDK's reply has no field for it. `mixed`: the weight versions of each sequence that has more than one.
        """
        self._counters.mixed_weights += len(mixed)
        not_logged = self._weight_logs.allow(upstream.url, self._clock.monotonic_s())
        if not_logged is not None:
            fields = {"upstream": upstream.url, "request_id": sample.request_id, "versions": list(mixed[0])}
            more = {"sequences": len(mixed), "samples_not_told": not_logged}
            log.warning("the weights changed in the middle of a generation", extra={**fields, **more})

    async def _decode_large(self, call: vllm.UpstreamCall, spec: SampleSpec, body: Body) -> vllm.Decoded | Fault:
        """Decode a reply that would hold up the loop."""
        if len(body) > _LARGE_IN_PARTS_BYTES or not vllm.reads_in_parts(call, spec):
            return await self._aside(partial(vllm.decode_reply, call, spec, body))
        async with self._large:
            # One such reply in each turn of the loop.
            await asyncio.sleep(0)
            return vllm.decode_reply(call, spec, body)

    async def _encode(self, sample: LiveSample, decoded: Sequence[vllm.Decoded]) -> bytes | Fault:
        result = vllm.combine(sample.spec, decoded)
        size_bytes = result.size_bytes
        # A greedy sample repeats one sequence n times: a small reply can make a result of any size.
        if size_bytes > LARGEST_RESULT_BYTES:
            return too_large()
        self._counters.tokens_sampled += result.num_tokens
        if size_bytes <= _LARGE_BYTES:
            return proto.encode_sample_response(result)
        return await self._aside(partial(proto.encode_sample_response, result))

    async def _aside(self, work: Callable[[], T]) -> T:
        """Run `work`, which is pure and long, in a thread."""
        async with self._large:
            worked = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(worked)
            finally:
                if not worked.done():
                    # Cancelled, but the thread goes on, and the next one must not run beside it.
                    await asyncio.wait([worked])

    def _judge(self, upstream: Upstream | None, fault: Fault, budget: retry.Budget) -> retry.Decision:
        """Count the fault, report it to the pool, and decide what to do next."""
        # A sample that waits for its adapter, for example, has made no attempt.
        if upstream is not None:
            self._counters.failed_attempt(fault.kind)
            self._pool.failed(upstream, fault)
        decision = retry.decide(fault, budget, self._policy, self._clock.monotonic_s(), self._rng_unit())
        if isinstance(decision, retry.Wait) and fault.kind is not FaultClass.NEVER_EXECUTED:
            self._counters.reexecutions += 1
        return decision

    async def _paused(self, sample: LiveSample, reason: str, wait: Awaitable[T]) -> T:
        """Await `wait` and return its result; meanwhile polls report `reason`, here and at other workers."""
        sample.paused_reason = reason
        self.paused += 1
        self._store.mark_paused(sample.key, sample.claim, paused=True)
        try:
            result = await wait
        finally:
            sample.paused_reason = None
            self.paused -= 1
        self._store.mark_paused(sample.key, sample.claim, paused=False)
        return result


def _headers(sample: LiveSample, call: vllm.UpstreamCall, attempt: int) -> dict[str, str]:
    """Return the headers that let an operator find the request in the upstream's log, and a router pin the session."""
    # The scores of the prompt are a request of their own, not another execution of the sample.
    suffix = "" if call.sequences else "-scores"
    headers = {
        "X-Request-Id": f"{sample.request_id}{suffix}-a{attempt}",
        "X-Session-ID": sample.session.sampling_session_id,
    }
    if sample.trace is not None:
        headers["traceparent"] = sample.trace
    return headers
