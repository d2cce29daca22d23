"""Measure small requests: the worker's server and application, and uvicorn with Starlette as they come.

The requests are heartbeats, which Starlette's routing finds, and polls for a sample whose result is ready, which are in
the table of hot paths. A client process sends them; it keeps and closes connections as the SDK does, so most requests
come over a new one. Behind our server is the whole public application on a store in memory; behind the baseline, a
handler that parses the body and answers a small JSON. Ours answers a poll in protobuf, as the SDK asks for it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks import load_process
from benchmarks.baselines import starlette_defaults
from benchmarks.turns import Case, Contender, Figure, Findings, Plan, WrongResult, measure
from shared.core import ids
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from shared.http.server import PublicServer
from tests.app_bench import AppBench, settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

IN_FLIGHT = 64
REQUESTS = 6_000
BACKLOG = 1_024
SESSION_ID = ids.new_session_id(bytes(16), ids.ANONYMOUS_SECRET)


async def serving(plan: Plan) -> Findings:
    calls = plan.calls(REQUESTS)
    async with _ours() as (our_url, request_id), _baseline() as their_url:
        cases = [
            ("serve a small request", load_process.HEARTBEAT, SESSION_ID),
            ("serve a poll whose result is ready", load_process.POLL, request_id),
        ]
        figures: list[Figure] = []
        for what, call, of_id in cases:
            contenders = [
                Contender("gateway", _load(our_url, call, of_id)),
                Contender("uvicorn and Starlette as they come", _noted(_load(their_url, call, of_id))),
            ]
            case = Case(f"{what}, {IN_FLIGHT} in flight", calls, contenders)
            figures += await measure(case, plan.rounds)
        return Findings(figures)


def _load(url: str, call: str, of_id: str) -> Callable[[int], Awaitable[None]]:
    async def work(calls: int) -> None:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.load_process", url, call, of_id, str(calls), str(IN_FLIGHT)
        )
        if await client.wait() != 0:
            raise WrongResult(f"{url} did not answer every {call} with 200")

    return work


def _noted(work: Callable[[int], Awaitable[None]]) -> Callable[[int], Awaitable[None]]:
    """Wrap the baseline's work in an access log, which is its default; the gateway has none."""

    async def with_log(calls: int) -> None:
        with starlette_defaults.access_log():
            await work(calls)

    return with_log


@asynccontextmanager
async def _ours() -> AsyncIterator[tuple[str, str]]:
    """Its address, and the id of a sample that has ended there."""
    bench = await AppBench().open()
    request_id = await settled(bench)
    # What is fetched has its time started in the store, as in a worker.
    expiry = asyncio.create_task(bench.expiry.run())
    with _listener() as listener:
        server = PublicServer(
            bench.app.starlette,
            listener,
            Edge(HttpLimits()),
            backlog=BACKLOG,
            hot=bench.app.hot,
        )
        await server.start()
        try:
            yield _url(listener), request_id
        finally:
            await server.stop(1.0)
            expiry.cancel()
            await asyncio.gather(expiry, return_exceptions=True)
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
