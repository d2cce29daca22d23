"""Pass OpenAI's requests on to the upstreams: the same choice, limits and source IP as for samples, and streams.

A request is sent again only if it was never executed and the client has not received a byte; the whole request is kept
for that. A request that may have run is not repeated, since the client would never know that it ran twice.
"""

from __future__ import annotations

import asyncio
import errno
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict
from yarl import URL

from shared.core import retry
from shared.core.errors import ReplyBroken, UpstreamBroke, UpstreamUnavailable
from shared.core.faults import BreakKind, Fault, FaultClass, classify_break, classify_reply
from shared.http.reply import send_response
from shared.wire import passing
from workers.passing.relay import BROKEN, collect, relay, while_connected
from workers.upstream.client.port import Exchange
from workers.upstream.forwarder import fault_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import aiohttp
    from starlette.types import Send

    from shared.clock import Clock
    from shared.counters import Counters
    from shared.http.request import Request
    from workers.upstream.pool import UpstreamPool
    from workers.upstream.upstream import Upstream

# OpenAI's clients give up after 600 s, and repeat requests that were answered with 429 or 503.
LONGEST_WAIT_S: Final = 60.0
# Statuses that concern the operator, not the client.
_OPERATORS: Final = frozenset({401, 403})


class _Broken(Exception):
    """An exchange that had no reply, or one that broke off."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.for_operators)
        self.fault = fault


class _Passed(Exchange):
    """A request under way. Breaking it off cancels the task that serves it."""

    __slots__ = ("_task", "broken")

    def __init__(self, now_s: Callable[[], float], task: asyncio.Task[None]) -> None:
        super().__init__(now_s)
        self._task = task
        self.broken: BreakKind | None = None

    def break_off(self, kind: BreakKind) -> None:
        if self.broken is None:
            self.broken = kind
            self._task.cancel()


class OpenAiProxy:
    """Passes requests of OpenAI's API on to upstreams."""

    def __init__(
        self,
        pool: UpstreamPool,
        session: aiohttp.ClientSession,
        counters: Counters,
        clock: Clock,
        wait_s: float,
        rng_unit: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Try a request that no upstream takes again for `wait_s`."""
        self._pool = pool
        self._session = session
        self._counters = counters
        self._clock = clock
        self._policy = retry.Policy(0, retry_ambiguous=False, upstream_wait_s=min(wait_s, LONGEST_WAIT_S))
        self._rng_unit = rng_unit
        self._sleep = sleep

    async def pass_on(self, request: Request, path: str, body: bytes, model_name: str, send: Send) -> None:
        """Send the reply of an upstream that serves `model_name` (the upstream's name of the model).

        Raises `UpstreamUnavailable` or `UpstreamBroke` before anything was sent, `ClientGone`, and `ReplyBroken`.
        """
        budget = retry.Budget()
        avoid: Upstream | None = None
        async with while_connected(request.connection):
            while True:
                avoid = upstream = self._pool.choose(model_name, avoid)
                fault = await self._attempt(request, upstream, path, body, send)
                if fault is None:
                    return
                budget = await self._wait(upstream, fault, budget)

    async def _wait(self, upstream: Upstream, fault: Fault, budget: retry.Budget) -> retry.Budget:
        """Pause before the next attempt. If there may be none, raise what the client gets."""
        self._failed(upstream, fault)
        decision = retry.decide(fault, budget, self._policy, self._clock.monotonic_s(), self._rng_unit())
        if isinstance(decision, retry.Wait):
            await self._sleep(decision.delay_s)
            return decision.budget
        if fault.kind is FaultClass.NEVER_EXECUTED:
            raise UpstreamUnavailable("no upstream takes the request at the moment; send it again later")
        raise UpstreamBroke("the upstream did not answer; its request may have been executed")

    async def _attempt(self, request: Request, upstream: Upstream, path: str, body: bytes, send: Send) -> Fault | None:
        """Return None once the client has the reply, or why this upstream gave none."""
        self._counters.attempts += 1
        upstream.sent += 1
        begun = False
        try:
            async with self._exchange(request, upstream, path, body) as (exchange, response):
                if response.status != 200:
                    return await self._refused(upstream, response, send)
                begun = True
                await relay(response, passing.to_client(response.raw_headers), send)
                self._pool.completed(upstream)
                upstream.answered(exchange, self._clock.monotonic_s())
                return None
        except _Broken as broken:
            if begun:
                self._failed(upstream, broken.fault)
                raise ReplyBroken(broken.fault.for_operators) from None
            return broken.fault
        except ReplyBroken:
            self._failed(upstream, classify_break(BreakKind.BODY_CUT))
            raise

    def _failed(self, upstream: Upstream, fault: Fault) -> None:
        self._counters.failed_attempt(fault.kind)
        self._pool.failed(upstream, fault)

    async def _refused(self, upstream: Upstream, response: aiohttp.ClientResponse, send: Send) -> Fault | None:
        """Pass a refusal on to the client, unless the request may be sent again or it concerns the operator."""
        body, _ = await collect(response)
        fault = classify_reply(response.status, body, response.headers)
        if fault.kind is FaultClass.NEVER_EXECUTED:
            return fault
        self._failed(upstream, fault)
        if response.status in _OPERATORS or response.status < 400:
            raise UpstreamBroke(fault.message)
        headers = passing.without(passing.to_client(response.raw_headers), b"content-length")
        await send_response(send, response.status, headers, body)
        return None

    @asynccontextmanager
    async def _exchange(
        self, request: Request, upstream: Upstream, path: str, body: bytes
    ) -> AsyncIterator[tuple[Exchange, aiohttp.ClientResponse]]:
        """Yield the reply, whose body is still to be read. The block's end closes the connection unless it was read.

        Raises `_Broken`.
        """
        task = asyncio.current_task()
        assert task is not None
        exchange = _Passed(self._clock.monotonic_s, task)
        upstream.attempts.add(exchange)
        try:
            response = await self._open(request, upstream, path, body)
            exchange.sent_s = self._clock.monotonic_s()
            try:
                yield exchange, response
            finally:
                response.close()
        except asyncio.CancelledError:
            upstream.cut_off(exchange, self._clock.monotonic_s())
            # The client may have gone in the same turn of the loop; then that cancel counts.
            if exchange.broken is None or task.uncancel():
                raise
            raise _Broken(classify_break(exchange.broken, upstream.url)) from None
        finally:
            upstream.attempts.discard(exchange)

    async def _open(self, request: Request, upstream: Upstream, path: str, body: bytes) -> aiohttp.ClientResponse:
        kept = passing.to_openai(request.scope()["headers"])
        headers = CIMultiDict((name.decode(), value.decode()) for name, value in kept)
        url = URL(upstream.url.rstrip("/") + path)
        try:
            response = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except BROKEN as error:
            if getattr(error, "errno", None) == errno.ECONNREFUSED:
                upstream.refused(self._clock.monotonic_s())
            raise _Broken(fault_of(error, upstream.url)) from None
        upstream.accepted()
        return response
