"""Measure one exchange with an upstream, at several numbers in flight: the worker's forwarder, aiohttp, and httpx.

The upstream is a simulated vLLM in a process of its own that answers at once; prompts have 128 tokens, results 64. Each
turn opens its own connections and closes them at its end, since two pools of 16,384 exceed a limit of 20,000 open
files; a turn has at least four exchanges per connection.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Protocol

from benchmarks import bodies
from benchmarks.baselines import notes_on_missing
from benchmarks.baselines.aiohttp_forwarder import AiohttpForwarder
from benchmarks.turns import Case, Contender, Findings, Plan, WrongResult, measure
from gateway.bench.installation import SimulatedUpstream
from gateway.bench.scenario import Scenario
from gateway.machine.kernel import raise_fd_limit
from shared.clock import SystemClock
from shared.config import Settings
from shared.core.upstream_protocol import UpstreamProtocol
from shared.wire import vllm
from shared.wire.sdk.sample import decode_sample
from workers.upstream.connector import make_client, make_probe_session
from workers.upstream.forwarder import Forwarder
from workers.upstream.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

IN_FLIGHT = (64, 512, 4_096, 16_384)
QUICK_IN_FLIGHT = (16,)
# httpx searches its whole pool at each request, which takes minutes with 4,096 connections.
HTTPX_IN_FLIGHT_AT_MOST = 512
LEAST_EXCHANGES = 4_000
EXCHANGES_PER_CONNECTION = 4
HEADERS = {"X-Request-Id": "gwss-benchmark:1-a1", "X-Session-ID": "gwss-benchmark"}
PROMPT_TOKENS, MAX_TOKENS = 128, 64


class Way(Protocol):
    """One way to make an exchange."""

    async def exchange(self) -> bytes: ...

    async def close(self) -> None: ...


class OurWay:
    def __init__(self, url: str, body: bytes) -> None:
        settings = Settings(upstreams=(url,), max_connections=0)
        self._client = make_client(settings, None)
        self._questions = make_probe_session(settings, None)
        self._forwarder = Forwarder(self._client, self._questions, SystemClock())
        self._upstream = Upstream(url)
        self._body = body

    async def exchange(self) -> bytes:
        reply = await self._forwarder.post(
            self._upstream, self._upstream.samples_urls[UpstreamProtocol.COMPLETIONS], self._body, HEADERS
        )
        if not isinstance(reply, bytes):
            raise WrongResult(f"the forwarder returned {reply}")
        return reply

    async def close(self) -> None:
        await self._client.close()
        await self._questions.close()


class Library(Protocol):
    """The interface of a baseline."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes: ...

    async def close(self) -> None: ...


class LibraryWay:
    def __init__(self, forwarder: Library, url: str, body: bytes) -> None:
        self._forwarder = forwarder
        self._url, self._body = f"{url}/v1/completions", body

    async def exchange(self) -> bytes:
        return await self._forwarder.post(self._url, self._body, HEADERS)

    async def close(self) -> None:
        await self._forwarder.close()


def turn(open_way: Callable[[], Way], in_flight: int) -> Callable[[int], Awaitable[None]]:
    """Return work that opens connections, makes its exchanges with `in_flight` at a time, and closes them."""

    async def work(calls: int) -> None:
        way, left = open_way(), iter(range(calls))

        async def caller() -> None:
            for _ in left:
                require_result(await way.exchange())

        try:
            await asyncio.gather(*(caller() for _ in range(in_flight)))
        finally:
            await way.close()

    return work


def require_result(reply: bytes) -> None:
    """Check the end of the reply only, since parsing all of it would be most of the cost."""
    if not reply.endswith(b'"metrics":null}'):
        raise WrongResult(f"the upstream's reply ends with {reply[-40:]!r}")


async def forward(plan: Plan, numbers: Sequence[int] = ()) -> Findings:
    """Measure exchanges with each of `numbers` in flight; by default, those of the published table."""
    raise_fd_limit()
    found = Findings()
    upstream = SimulatedUpstream(Scenario(vllm_mode="instant", gen_seconds=0.0))
    await upstream.start()
    try:
        await _require_right(upstream.url)
        for in_flight in numbers or (QUICK_IN_FLIGHT if plan.quick else IN_FLIGHT):
            found.figures += await measure(forward_case(upstream.url, in_flight, plan), plan.rounds)
    finally:
        await upstream.stop()
    found.notes += notes_on_missing("forward", "httpx")
    return found


def forward_case(url: str, in_flight: int, plan: Plan) -> Case:
    body = upstream_body()
    contenders = [
        Contender("gateway", turn(lambda: OurWay(url, body), in_flight)),
        Contender("aiohttp", turn(lambda: LibraryWay(AiohttpForwarder(), url, body), in_flight)),
    ]
    if in_flight <= HTTPX_IN_FLIGHT_AT_MOST and not notes_on_missing("forward", "httpx"):
        from benchmarks.baselines.httpx_forwarder import HttpxForwarder

        contenders.append(Contender("httpx", turn(lambda: LibraryWay(HttpxForwarder(), url, body), in_flight)))
    calls = max(plan.calls(LEAST_EXCHANGES), EXCHANGES_PER_CONNECTION * in_flight)
    return Case(f"forward, {in_flight:,} in flight", calls, contenders)


def upstream_body() -> bytes:
    asked = decode_sample(bodies.asample_body(PROMPT_TOKENS, MAX_TOKENS))
    (call,) = vllm.plan_calls(asked.spec, "sim/tiny", None)
    return call.body


async def _require_right(url: str) -> None:
    way = OurWay(url, upstream_body())
    try:
        reply = json.loads(await way.exchange())
    finally:
        await way.close()
    if len(reply["choices"][0]["token_ids"]) != MAX_TOKENS:
        raise WrongResult("the simulated vLLM generated a wrong number of tokens")
