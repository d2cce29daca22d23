"""The SDK's second way of waiting: one poll for a whole sampling session, then a fetch for each finished sample.

One request is open at a time. While samples are awaited it is a long poll. While only acknowledgements are due it asks
for an immediate answer (`timeout` 0). Otherwise there is none.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway.bench.load.reactions import Act, Streak, on_session_poll
from gateway.bench.load.replies import Completion, SampleFailure, detail_of, event_of, read_completions
from gateway.bench.load.requests import retrieve_futures_body
from gateway.bench.load.transport import NoReply

if TYPE_CHECKING:
    from gateway.bench.load.requests import RequestTemplates
    from gateway.bench.load.tally import LoadTally
    from gateway.bench.load.transport import ConnectionPool, GatewayReply

# The SDK polls once more after the last completion before it stops.
_IDLE_POLLS: Final = 1


class SessionPoller:
    def __init__(
        self, pool: ConnectionPool, endpoints: RequestTemplates, sampling_session_id: str, tally: LoadTally
    ) -> None:
        self._pool = pool
        self._endpoints = endpoints
        self._sampling_session_id = sampling_session_id
        self._tally = tally
        self._awaited: dict[str, asyncio.Future[Completion | SampleFailure]] = {}
        self._early: dict[str, Completion] = {}
        self._unacknowledged: set[str] = set()
        self._cursor = 0
        self._idle_polls_left = 0
        self._wanted = asyncio.Event()
        self._ended: SampleFailure | None = None

    async def completion(self, request_id: str) -> Completion | SampleFailure:
        """Wait until the session poll names this sample; return a `SampleFailure` once polling has ended for good."""
        if self._ended is not None:
            return self._ended
        if (early := self._early.pop(request_id, None)) is not None:
            return early
        future: asyncio.Future[Completion | SampleFailure] = asyncio.get_running_loop().create_future()
        self._awaited[request_id] = future
        self._wanted.set()
        try:
            return await future
        finally:
            self._awaited.pop(request_id, None)

    def acknowledge(self, request_id: str) -> None:
        """Note that the whole result or error has arrived, so that the gateway may drop it."""
        self._unacknowledged.add(request_id)
        self._wanted.set()

    async def run(self) -> None:
        """Poll until cancelled, or until the gateway sends an answer that the SDK gives up on."""
        streak = Streak()
        while self._ended is None:
            while not (self._awaited or self._unacknowledged or self._idle_polls_left):
                self._wanted.clear()
                await self._wanted.wait()
            streak = await self._poll(streak)

    async def close(self) -> None:
        """Send the outstanding acknowledgements in a last poll, and ignore its failure."""
        if self._unacknowledged and self._ended is None:
            await self._exchange(list(self._unacknowledged), 0.0)

    async def _poll(self, streak: Streak) -> Streak:
        acknowledged = list(self._unacknowledged)
        reply = await self._exchange(acknowledged, None if self._awaited else 0.0)
        reaction, streak = on_session_poll(event_of(reply), streak)
        if reaction.act is Act.ACCEPT and reply is not None:
            self._unacknowledged.difference_update(acknowledged)
            self._take(reply)
        elif reaction.act is Act.FATAL:
            status = reply.status if reply is not None else 0
            self._end(SampleFailure(f"session poll {status}", detail_of(reply)))
        else:
            await asyncio.sleep(reaction.delay_s)
        return streak

    async def _exchange(self, acknowledged: list[str], timeout_s: float | None) -> GatewayReply | None:
        self._tally.session_polls += 1
        endpoint = self._endpoints.retrieve_futures if timeout_s is None else self._endpoints.acknowledge
        body = retrieve_futures_body(self._sampling_session_id, self._cursor, acknowledged, timeout_s)
        try:
            return await self._pool.send(endpoint.request(body), endpoint.read_timeout_s)
        except NoReply:
            return None

    def _take(self, reply: GatewayReply) -> None:
        completions = read_completions(reply)
        if isinstance(completions, SampleFailure):
            self._end(completions)
            return
        self._cursor = completions.cursor
        self._idle_polls_left = _IDLE_POLLS if completions.entries else max(0, self._idle_polls_left - 1)
        for entry in completions.entries:
            self._announce(entry)

    def _announce(self, entry: Completion) -> None:
        future = self._awaited.get(entry.request_id)
        if future is None:
            # A completion may arrive before the promise of its sample.
            self._early[entry.request_id] = entry
        elif not future.done():
            future.set_result(entry)

    def _end(self, reason: SampleFailure) -> None:
        self._ended = reason
        for future in self._awaited.values():
            if not future.done():
                future.set_result(reason)
