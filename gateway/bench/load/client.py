"""A client that behaves like the SDK: a session with heartbeats, submissions behind a gate, polls, retries.

One `SdkClient` stands for one SDK process with one sampling client. `reactions.py` decides what it does after each
reply, `pacing.py` when it may submit, and `replies.py` what a reply means; this module holds the order of the steps.
It differs from the SDK in two ways: it compares results with the expected ones, and on request it misbehaves (abandons
polls, cancels, submits twice, loses replies).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gateway.bench.load import requests
from gateway.bench.load.pacing import SubmitGate, at_most, backpressure_pause_s
from gateway.bench.load.reactions import Act, Streak, on_asample, on_setup, resubmit_delay_s
from gateway.bench.load.replies import (
    Promise,
    PromiseLost,
    SampleFailure,
    detail_of,
    event_of,
    read_flag,
    read_promise,
    read_text,
)
from gateway.bench.load.retrieval import Retriever
from gateway.bench.load.session_poll import SessionPoller
from gateway.bench.load.transport import ConnectionPool, NoReply
from gateway.bench.load.workload import sample
from gateway.simulator.stats import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.bench.load.requests import RequestTemplate
    from gateway.bench.load.tally import LoadTally
    from gateway.bench.load.transport import GatewayAddress, GatewayReply
    from gateway.bench.load.verification import Verifier
    from gateway.bench.load.workload import Sample, Workload
    from shared.clock import Clock

HEARTBEAT_S: Final = 10.0


class SetupFailed(Exception):
    """The gateway gave no session; the message is for the person who started the run."""


class Paused:
    """The gateway answered 429; the submission waits at the gate again."""


class SdkClient:
    """One SDK process with one sampling client. `session_poll`: None uses what client/config offers."""

    def __init__(
        self,
        target: GatewayAddress,
        api_key: str,
        workload: Workload,
        verifier: Verifier,
        tally: LoadTally,
        clock: Clock,
        *,
        session_poll: bool | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._workload = workload
        self._verifier = verifier
        self._tally = tally
        self._clock = clock
        self._session_poll = session_poll
        self._heartbeat_s = heartbeat_s
        self._endpoints = requests.RequestTemplates(target, api_key)
        self.traffic = Traffic()
        self._session_pool = ConnectionPool(target, self.traffic)
        self._submit_pool = ConnectionPool(target, self.traffic)
        self._retrieve_pool = ConnectionPool(target, self.traffic)
        self._poll_pool = ConnectionPool(target, self.traffic)
        self._pools = (self._session_pool, self._submit_pool, self._retrieve_pool, self._poll_pool)
        self._gate = SubmitGate(clock)
        self._jitter = random.Random(workload.seed)
        self._session_id = ""
        self._sampling_session_id = ""
        self._next_seq_id = 0
        self._retriever: Retriever | None = None

    @property
    def connections_opened(self) -> int:
        return sum(pool.connections_opened for pool in self._pools)

    @property
    def requests_sent(self) -> int:
        return sum(pool.requests_sent for pool in self._pools)

    @property
    def uses_session_poll(self) -> bool:
        return self._session_poll is True

    async def open(self) -> None:
        """Create a session and a sampling session. Raises `SetupFailed`."""
        config = await self._set_up(self._endpoints.client_config, requests.client_config_body())
        if self._session_poll is None:
            self._session_poll = read_flag(config, "sample_use_retrieve_futures")
        self._session_id = await self._set_up_id(
            self._endpoints.create_session, requests.create_session_body(), "session_id"
        )
        self._sampling_session_id = await self._set_up_id(
            self._endpoints.create_sampling_session,
            requests.create_sampling_session_body(self._session_id, self._workload.model),
            "sampling_session_id",
        )

    async def run(self, indices: Iterator[int], concurrency: int) -> None:
        """Run every sample of `indices`, at most `concurrency` of them between call and result."""
        poller = None
        if self.uses_session_poll:
            poller = SessionPoller(self._poll_pool, self._endpoints, self._sampling_session_id, self._tally)
        self._retriever = Retriever(self._retrieve_pool, self._endpoints, poller, self._workload, self._tally)
        # If a task beside the samples fails, the run ends; when the samples end, those tasks end.
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._heartbeats())]
            if poller is not None:
                beside.append(group.create_task(poller.run()))
            try:
                await at_most(concurrency, indices, self._run_sample)
                if poller is not None:
                    await poller.close()
            finally:
                for task in beside:
                    task.cancel()

    def close(self) -> None:
        self._gate.close()
        for pool in self._pools:
            pool.close()

    # -- one sample

    async def _run_sample(self, index: int) -> None:
        wanted = sample(self._workload, index)
        started_s = self._clock.monotonic_s()
        resubmissions = 0
        outcome, posted_s = await self._attempt(wanted)
        while isinstance(outcome, PromiseLost):
            await asyncio.sleep(resubmit_delay_s(resubmissions, self._jitter.random()))
            resubmissions += 1
            self._tally.resubmitted += 1
            outcome, posted_s = await self._attempt(wanted)
        if outcome is None:
            self._tally.cancelled += 1
            return
        broken = outcome if isinstance(outcome, SampleFailure) else self._verifier.complaint(outcome, wanted)
        if broken is None:
            self._tally.succeed(started_s, posted_s, self._clock.monotonic_s())
        else:
            self._tally.fail(broken.kind, f"sample {wanted.index}: {broken.detail}", wrong=broken.wrong)

    async def _attempt(self, wanted: Sample) -> tuple[bytes | PromiseLost | SampleFailure | None, float]:
        """Submit and wait. Return the result's bytes (None if cancelled as planned), and when it was posted."""
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        promise, posted_s = await self._submit(wanted, seq_id)
        if not isinstance(promise, Promise):
            return promise, posted_s
        self._tally.promise(posted_s, self._clock.monotonic_s())
        assert self._retriever is not None
        if wanted.cancel_after_s is None:
            return await self._retriever.result(promise.request_id, wanted.index), posted_s
        try:
            async with asyncio.timeout(wanted.cancel_after_s):
                return await self._retriever.result(promise.request_id, wanted.index), posted_s
        except TimeoutError:
            await self._retriever.cancel(promise.request_id)
            return None, posted_s

    # -- submitting

    async def _submit(self, wanted: Sample, seq_id: int) -> tuple[Promise | PromiseLost | SampleFailure, float]:
        """Post until the gateway decides. Return the outcome, and when that post passed the gate."""
        body = requests.asample_body(self._workload, wanted, self._sampling_session_id, seq_id)
        request = self._endpoints.asample.request(body)
        first_s: float | None = None
        while True:
            throttled = await self._gate.enter()
            posted_s = self._clock.monotonic_s()
            first_s = posted_s if first_s is None else first_s
            try:
                outcome = await self._submit_inside(request, wanted, first_s)
                if isinstance(outcome, Paused):
                    self._gate.back_pressure(backpressure_pause_s(self._workload.prompt_tokens))
            finally:
                self._gate.leave(throttled)
            if not isinstance(outcome, Paused):
                self._tally.submit_s.append(self._clock.monotonic_s() - first_s)
                return outcome, posted_s
            self._tally.paused += 1

    async def _submit_inside(
        self, request: bytes, wanted: Sample, first_s: float
    ) -> Promise | PromiseLost | SampleFailure | Paused:
        streak = Streak()
        if wanted.duplicate.reply_lost:
            self._tally.duplicates += 1
            with suppress(NoReply):
                await self._submit_pool.send_and_drop(request)
        while True:
            reply = await self._post_asample(request, wanted)
            if isinstance(reply, SampleFailure):
                return reply
            reaction, streak = on_asample(event_of(reply), streak, self._clock.monotonic_s() - first_s)
            if reaction.act is Act.ACCEPT and reply is not None:
                return read_promise(reply, self._workload.num_samples)
            if reaction.act is Act.AGAIN:
                await asyncio.sleep(reaction.delay_s)
                continue
            return _end_of_submit(reaction.act, reply)

    async def _post_asample(self, request: bytes, wanted: Sample) -> GatewayReply | SampleFailure | None:
        if not wanted.duplicate.at_once:
            return await self._exchange(self._submit_pool, self._endpoints.asample, request)
        self._tally.duplicates += 1
        first, second = await asyncio.gather(
            self._exchange(self._submit_pool, self._endpoints.asample, request),
            self._exchange(self._submit_pool, self._endpoints.asample, request),
        )
        return _same_promise(first, second, self._workload.num_samples)

    # -- session

    async def _heartbeats(self) -> None:
        request = self._endpoints.heartbeat.request(requests.heartbeat_body(self._session_id))
        while True:
            await asyncio.sleep(self._heartbeat_s)
            started_s = self._clock.monotonic_s()
            reply = await self._exchange(self._session_pool, self._endpoints.heartbeat, request)
            self._tally.beat(self._clock.monotonic_s() - started_s, reply is not None and reply.status == 200)

    async def _set_up_id(self, endpoint: RequestTemplate, body: bytes, name: str) -> str:
        reply = await self._set_up(endpoint, body)
        value = read_text(reply, name)
        if value is None:
            raise SetupFailed(f"the gateway's reply lacks {name!r}: {detail_of(reply)}")
        return value

    async def _set_up(self, endpoint: RequestTemplate, body: bytes) -> GatewayReply:
        streak = Streak()
        while True:
            reply: GatewayReply | None = None
            try:
                reply = await self._session_pool.send(endpoint.request(body), endpoint.read_timeout_s)
                answer = f"{reply.status}: {detail_of(reply)}"
            except NoReply as error:
                answer = f"nothing: {error}"
            reaction, streak = on_setup(event_of(reply), streak)
            if reaction.act is Act.ACCEPT and reply is not None:
                return reply
            if reaction.act is Act.FATAL:
                raise SetupFailed(f"the gateway answered {endpoint.name} with {answer}")
            await asyncio.sleep(reaction.delay_s)

    async def _exchange(self, pool: ConnectionPool, endpoint: RequestTemplate, request: bytes) -> GatewayReply | None:
        try:
            return await pool.send(request, endpoint.read_timeout_s)
        except NoReply:
            return None


def _end_of_submit(act: Act, reply: GatewayReply | None) -> PromiseLost | SampleFailure | Paused:
    if act is Act.PAUSE:
        return Paused()
    if act is Act.RESUBMIT:
        return PromiseLost()
    return SampleFailure(f"asample {reply.status if reply is not None else 0}", detail_of(reply))


def _same_promise(
    first: GatewayReply | None, second: GatewayReply | None, num_samples: int
) -> GatewayReply | SampleFailure | None:
    """Return the reply to continue with. If both were accepted, they must promise the same sample."""
    if first is None or first.status != 200:
        return second
    if second is not None and second.status == 200:
        promised = read_promise(first, num_samples)
        if promised != (repeated := read_promise(second, num_samples)):
            return SampleFailure("duplicate promised another sample", f"{promised} and {repeated}", wrong=True)
    return first
