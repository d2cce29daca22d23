"""Wait for the result of one sample: by a poll of its own, or by a fetch once the session poll has announced it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway.bench.load import requests
from gateway.bench.load.reactions import Act, Reaction, Streak, on_retrieve
from gateway.bench.load.replies import Again, Payload, PromiseLost, SampleFailure, detail_of, event_of, read_result
from gateway.bench.load.transport import NoReply
from gateway.bench.load.workload import abandon_after_s

if TYPE_CHECKING:
    from gateway.bench.load.requests import RequestTemplates
    from gateway.bench.load.session_poll import SessionPoller
    from gateway.bench.load.tally import LoadTally
    from gateway.bench.load.transport import ConnectionPool, GatewayReply
    from gateway.bench.load.workload import Workload


# An announced result is delivered at once, so its fetch must be dropped quickly to be dropped at all.
_READY_FETCH_S: Final = 0.005


class Abandoned:
    """The client dropped its own poll."""


class Retriever:
    """Fetch results. `poller` is None if every sample polls for itself."""

    def __init__(
        self,
        pool: ConnectionPool,
        endpoints: RequestTemplates,
        poller: SessionPoller | None,
        workload: Workload,
        tally: LoadTally,
    ) -> None:
        self._pool = pool
        self._endpoints = endpoints
        self._poller = poller
        self._workload = workload
        self._tally = tally
        self._fetch_s = None if poller is None else _READY_FETCH_S

    async def result(self, request_id: str, index: int) -> bytes | PromiseLost | SampleFailure:
        """Return the result's protobuf bytes. `index` decides which of its polls are abandoned."""
        if self._poller is None:
            return await self._fetch(request_id, index, metadata=True)
        completion = await self._poller.completion(request_id)
        if isinstance(completion, SampleFailure):
            return completion
        outcome = await self._fetch(request_id, index, metadata=completion.size_bytes == 0)
        if isinstance(outcome, bytes) or (isinstance(outcome, SampleFailure) and outcome.acknowledged):
            self._poller.acknowledge(request_id)
        return outcome

    async def cancel(self, request_id: str) -> None:
        endpoint = self._endpoints.cancel_future
        try:
            await self._pool.send(endpoint.request(requests.cancel_future_body(request_id)), endpoint.read_timeout_s)
        except NoReply:
            # As in the SDK: a failed cancel only wastes a generation.
            return

    async def _fetch(self, request_id: str, index: int, *, metadata: bool) -> bytes | PromiseLost | SampleFailure:
        streak = Streak()
        abandoned = poll = 0
        while True:
            drop_after_s = abandon_after_s(self._workload, index, poll, abandoned, self._fetch_s)
            reply = await self._poll(request_id, metadata, drop_after_s)
            poll += 1
            if isinstance(reply, Abandoned):
                abandoned += 1
                continue
            reaction, streak = on_retrieve(event_of(reply), streak)
            outcome = _outcome(reaction, reply, metadata)
            if isinstance(outcome, Again):
                metadata = outcome.allow_metadata_only
                if reaction.delay_s > 0:
                    await asyncio.sleep(reaction.delay_s)
                continue
            return outcome.data if isinstance(outcome, Payload) else outcome

    async def _poll(
        self, request_id: str, metadata: bool, drop_after_s: float | None
    ) -> GatewayReply | Abandoned | None:
        self._tally.polls += 1
        endpoint = self._endpoints.retrieve_future
        request = endpoint.request(requests.retrieve_future_body(request_id, metadata))
        try:
            if drop_after_s is None:
                return await self._pool.send(request, endpoint.read_timeout_s)
            async with asyncio.timeout(drop_after_s):
                return await self._pool.send(request, endpoint.read_timeout_s)
        except NoReply:
            return None
        except TimeoutError:
            self._tally.abandoned_polls += 1
            return Abandoned()


def _outcome(
    reaction: Reaction, reply: GatewayReply | None, metadata: bool
) -> Payload | Again | PromiseLost | SampleFailure:
    if reaction.act is Act.ACCEPT and reply is not None:
        return read_result(reply, metadata)
    if reaction.act is Act.AGAIN:
        return Again(metadata)
    if reaction.act is Act.RESUBMIT:
        return PromiseLost()
    return SampleFailure(f"retrieve {reply.status if reply is not None else 0}", detail_of(reply))
