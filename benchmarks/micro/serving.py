"""Serving one small request: the worker's server and application, and uvicorn with Starlette as they come.

Heartbeats from a client process that keeps and closes connections as the SDK does, so most come over a new one. Behind
ours is the whole public application on a store in memory; behind the baseline a handler that parses the body.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks.baselines import starlette_defaults
from benchmarks.turns import Case, Contender, Findings, Plan, WrongResult, measure
from shared.core import ids
from tests.app_bench import AppBench
from workers.http.edge import Edge
from workers.http.limits import HttpLimits
from workers.http.server import PublicServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

IN_FLIGHT = 64
REQUESTS = 6_000
BACKLOG = 1_024
SESSION_ID = ids.new_session_id(bytes(16), ids.ANONYMOUS_SECRET)


async def serving(plan: Plan) -> Findings:
    calls = plan.calls(REQUESTS)
    async with _ours() as our_url, _baseline() as their_url:
        contenders = [
            Contender("gateway", _load(our_url)),
            Contender("uvicorn and Starlette as they come", _load(their_url)),
        ]
        case = Case(f"serve a small request, {IN_FLIGHT} in flight", calls, contenders)
        return Findings(await measure(case, plan.rounds))


def _load(url: str) -> Callable[[int], Awaitable[None]]:
    async def work(calls: int) -> None:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.load_process", url, SESSION_ID, str(calls), str(IN_FLIGHT)
        )
        if await client.wait() != 0:
            raise WrongResult(f"{url} did not answer every request with 200")

    return work


@asynccontextmanager
async def _ours() -> AsyncIterator[str]:
    bench = await AppBench().open()
    with _listener() as listener:
        server = PublicServer(bench.app, listener, Edge(HttpLimits()), backlog=BACKLOG)
        await server.start()
        try:
            yield _url(listener)
        finally:
            await server.stop(1.0)
            await bench.close()


@asynccontextmanager
async def _baseline() -> AsyncIterator[str]:
    with _listener() as listener:
        async with starlette_defaults.serving(listener):
            yield _url(listener)


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
