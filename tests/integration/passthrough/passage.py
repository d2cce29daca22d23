"""A worker's public application behind the real edge, in front of a raw server: the gateway between two sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.app_bench import AppBench
from tests.integration.http.edge_server import Client, Served, serving_app, until
from tests.integration.passthrough.raw_upstream import RawUpstream, raw_upstream, soon
from workers.connector import make_training_session
from workers.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from workers.http.limits import HttpLimits

# At 2 ms each: long after any pair of loopback sockets has moved what it can.
_STILL_LOOKS: Final = 150


@dataclass
class Passage:
    upstream: RawUpstream
    bench: AppBench
    trainer: Trainer
    served: Served

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


@asynccontextmanager
async def training_passage(
    limits: HttpLimits | None = None, *, api_key: str | None = None, forward_key: bool = False, **settings: Any
) -> AsyncIterator[Passage]:
    async with raw_upstream() as upstream:
        bench = AppBench(**settings)
        trainer = Trainer(
            upstream.url + "/prefix",
            make_training_session(bench.settings, None),
            api_key=api_key,
            forward_key=forward_key,
        )
        bench.use_trainer(trainer)
        await bench.open()
        async with serving_app(bench.app, limits) as served:
            yield Passage(upstream, bench, trainer, served)
        await trainer.close()
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
