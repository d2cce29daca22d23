"""A worker's public application behind the real edge, in front of a raw server: the gateway between two sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.app_bench import AppBench
from tests.integration.http.edge_server import Client, Served, serving_app
from tests.integration.passthrough.raw_upstream import RawUpstream, raw_upstream, soon
from tests.waiting import until
from workers.passing.openai import OpenAiProxy
from workers.passing.training_server import TrainingServer
from workers.upstream.connector import make_session, make_training_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from shared.http.exchange import HotEntry
    from shared.http.head import HttpLimits

# At 1 ms each: long after any pair of loopback sockets has moved what it can.
_STILL_LOOKS: Final = 300


@dataclass
class Edge:
    """The public side."""

    served: Served
    bench: AppBench

    async def connect(self) -> Client:
        return await self.served.connect()

    async def ask(self, data: bytes) -> bytes:
        """What is answered to one request that asks for `Connection: close`."""
        client = await self.connect()
        try:
            assert await client.send(data)
            return bytes(await soon(client.read_to_end()))
        finally:
            client.close()


@dataclass
class Passage(Edge):
    upstream: RawUpstream
    trainer: TrainingServer


@dataclass
class OpenAiPassage(Edge):
    first: RawUpstream
    second: RawUpstream


@asynccontextmanager
async def training_passage(
    limits: HttpLimits | None = None, *, api_key: str | None = None, forward_key: bool = False, **settings: Any
) -> AsyncIterator[Passage]:
    """The raw server is a training server, under a path prefix."""
    async with raw_upstream() as upstream, serving_bench(limits, **settings) as (bench, served):
        async with make_training_session(bench.settings, None) as session:
            trainer = TrainingServer(upstream.url + "/prefix", session, api_key=api_key, forward_key=forward_key)
            bench.use(trainer=trainer)
            yield Passage(served, bench, upstream, trainer)


@asynccontextmanager
async def openai_passage(**settings: Any) -> AsyncIterator[OpenAiPassage]:
    """Two raw servers are vLLM; of equally busy ones the first is asked."""
    settings = {"upstream_api_key": "engine-key"} | settings
    async with raw_upstream() as first, raw_upstream() as second, serving_bench(None, **settings) as (bench, served):
        bench.pool.replace([first.url, second.url])
        async with make_session(bench.settings, None) as session:
            openai = OpenAiProxy(bench.pool, session, bench.counters, bench.clock, 60.0, lambda: 0.5, sleep=bench.sleep)
            bench.use(openai=openai)
            yield OpenAiPassage(served, bench, first, second)


class _HotTable(dict[tuple[bytes, bytes], "HotEntry"]):
    """That of the application that `bench` has now."""

    def __init__(self, bench: AppBench) -> None:
        super().__init__()
        self._bench = bench

    def get(self, key: tuple[bytes, bytes], default: Any = None) -> Any:
        return self._bench.app.hot.get(key, default)


@asynccontextmanager
async def serving_bench(limits: HttpLimits | None, **settings: Any) -> AsyncIterator[tuple[AppBench, Served]]:
    """`AppBench.use` may be called until the first request."""
    bench = await AppBench(**settings).open()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await bench.app.starlette(scope, receive, send)

    try:
        async with serving_app(app, limits, hot=_HotTable(bench)) as served:
            yield bench, served
    finally:
        await bench.close()


async def stands_still(value: Callable[[], int]) -> None:
    """Until a number that others raise stays the same for a while, or for good."""
    seen, looks = value(), 0

    def is_still() -> bool:
        nonlocal seen, looks
        looks = looks + 1 if value() == seen else 0
        seen = value()
        return looks >= _STILL_LOOKS

    await until(is_still, "everything to stand still")


def asking(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    """A request whose connection is closed by the reply."""
    lines = [f"{method} {path} HTTP/1.1", "Host: public", "Connection: close", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def head_of(reply: bytes) -> dict[str, str]:
    """The reply's headers; `:status` is its status."""
    status, *lines = reply.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return found | {":status": status.split(" ")[1]}


def body_of(reply: bytes) -> bytes:
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    whole = b""
    while size := int(body.partition(b"\r\n")[0], 16):
        start = body.index(b"\r\n") + 2
        whole += body[start : start + size]
        body = body[start + size + 2 :]
    return whole
