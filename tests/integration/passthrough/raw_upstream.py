"""A server on port 0 that shows every byte it is sent and answers whatever a test scripts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[["Exchange"], Awaitable[None]]

OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Exchange:
    """One request as it came over the wire. `closed` is set when the other side has ended the connection."""

    line: str
    headers: list[tuple[str, str]]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: asyncio.Event

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    async def body(self) -> AsyncIterator[bytes]:
        """The body in pieces, chunked or not."""
        if (length := self.header("content-length")) is not None:
            async for piece in self._exactly(int(length)):
                yield piece
        elif self.header("transfer-encoding") == "chunked":
            while size := int(await self.reader.readline(), 16):
                async for piece in self._exactly(size):
                    yield piece
                await self.reader.readline()
            await self.reader.readline()

    async def _exactly(self, size_bytes: int) -> AsyncIterator[bytes]:
        while size_bytes:
            piece = await self.reader.read(min(size_bytes, 65536))
            assert piece, "the body was cut"
            size_bytes -= len(piece)
            yield piece

    async def whole_body(self) -> bytes:
        return b"".join([piece async for piece in self.body()])

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def wait_closed(self) -> None:
        """Until the other side ends the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionResetError:
            pass
        self.closed.set()


class RawUpstream:
    """`handler` answers; `exchanges` are the requests so far."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.handler: Handler = say_ok
        self.url = ""
        self.failures: list[BaseException] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Take no connection any more, and end those that there are."""
        if self._server is None:
            return
        self._server.close()
        for exchange in self.exchanges:
            exchange.writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                await self._one(line.decode("latin-1").strip(), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except AssertionError as error:
            self.failures.append(error)
        finally:
            writer.close()

    async def _one(self, line: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers: list[tuple[str, str]] = []
        while (field := (await reader.readline()).decode("latin-1").strip()) != "":
            name, _, value = field.partition(":")
            headers.append((name.lower(), value.strip()))
        exchange = Exchange(line, headers, reader, writer, asyncio.Event())
        self.exchanges.append(exchange)
        await self.handler(exchange)


async def say_ok(exchange: Exchange) -> None:
    await exchange.whole_body()
    await exchange.say(OK)


@asynccontextmanager
async def raw_upstream() -> AsyncIterator[RawUpstream]:
    upstream = RawUpstream()
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()
    assert not upstream.failures, upstream.failures


def reply(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> bytes:
    """A whole reply with its length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def soon(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


# What no client may be sent as a reply, whatever the upstream means by it.
IMPOSSIBLE: Final = {
    "101": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabc" + OK,
    "600": reply("600 Odd"),
    "999": reply("999 Odd"),
    "a flood of 103": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 11 + OK,
}
