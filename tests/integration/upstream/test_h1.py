"""Both clients of samples against a server that sends exactly the bytes it is given.

The tests run on both adapters of the port. Those that make a client by `own` are about what aiohttp cannot do.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from shared.config import Settings
from shared.core.faults import BreakKind
from tests.waiting import DEADLINE_S, until
from workers.upstream.client.own import OwnClient
from workers.upstream.client.port import Broken, Exchange, Origin, Reply
from workers.upstream.connector import make_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiohttp.connector import AddrInfoType

    from shared.core.upstream_protocol import ClientChoice
    from workers.upstream.client.port import UpstreamClient

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
LONG = bytes(range(256)) * 16_000
KEPT_LONG = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(LONG) + LONG
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Script:
    """A server that answers each request of a connection with the next of `replies`, and closes after the last."""

    def __init__(self, replies: Sequence[bytes], *, closes: bool) -> None:
        self._replies = replies
        self._closes = closes
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for reply in self._replies:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(2))
                writer.write(reply)
                await writer.drain()
            if not self._closes:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def script(*replies: bytes, closes: bool = False, tls: ssl.SSLContext | None = None) -> AsyncIterator[Script]:
    made = Script(replies, closes=closes)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


@pytest.fixture
async def client(upstream_client: ClientChoice) -> AsyncIterator[UpstreamClient]:
    made = make_client(
        Settings(read_timeout_s=30.0, connect_timeout_s=30.0, upstream_client=upstream_client), None, to_loopback
    )
    yield made
    await made.close()


def own(**settings: Any) -> OwnClient:
    """Our own client: in aiohttp's pool keys take no turns, and idle connections do not make room for others."""
    client = make_client(Settings(**settings), None)
    assert isinstance(client, OwnClient)
    return client


async def to_loopback(_host: str, port: int) -> list[AddrInfoType]:
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]


async def ask(client: UpstreamClient, server: Script, exchange: Exchange | None = None) -> Reply:
    origin = Origin(tls=False, host="127.0.0.1", port=server.port)
    return await client.send(origin, HEAD, b"{}", exchange or Exchange())


async def broken(client: UpstreamClient, server: Script) -> BreakKind:
    with pytest.raises(Broken) as caught:
        await ask(client, server)
    return caught.value.kind


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (OK, b"{}"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;a=b\r\n}\r\n0\r\nTrailer: x\r\n\r\n",
            b"{}",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (KEPT_LONG, LONG),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"{}"),
    ],
)
async def test_a_reply_that_ends_leaves_its_connection_to_the_next(
    client: UpstreamClient, reply: bytes, body: bytes
) -> None:
    async with script(reply, reply) as server:
        assert [(await ask(client, server)).body for _ in range(2)] == [body, body]
        assert server.connections == 1
        assert server.requests == [HEAD + b"{}"] * 2


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        # A second reply to one request, whole or begun: it must not be taken for the next one's.
        OK + OK,
        OK + b"HTTP/1.1 2",
    ],
)
async def test_a_connection_that_cannot_be_trusted_any_more_is_closed(client: UpstreamClient, reply: bytes) -> None:
    async with script(reply) as server:
        assert (await ask(client, server)).body == b"{}"
        await until(lambda: server.ended == 1)
        assert (await ask(client, server)).body == b"{}"
        assert server.connections == 2


async def test_a_body_without_a_length_ends_with_the_connection(client: UpstreamClient) -> None:
    async with script(b"HTTP/1.1 200 OK\r\n\r\n{}", closes=True) as server:
        reply = await ask(client, server)
        assert (reply.body, reply.whole) == (b"{}", True)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", BreakKind.RESET_BEFORE_STATUS),
        (b"HTTP/1.1 200 OK\r\nContent-", BreakKind.RESET_BEFORE_STATUS),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}", BreakKind.BODY_CUT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", BreakKind.BODY_CUT),
        (b"HTTP/1.1 100 Continue\r\n\r\n", BreakKind.RESET_BEFORE_STATUS),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 11 + OK, BreakKind.NOT_HTTP),
        (b"220 mail.example ESMTP\r\n", BreakKind.NOT_HTTP),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", BreakKind.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", BreakKind.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\nContent-Length: 2\r\n\r\n{}", BreakKind.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40_000 + b"Content-Length: 2\r\n\r\n{}", BreakKind.NOT_HTTP),
    ],
)
async def test_a_reply_that_is_none_has_a_name(client: UpstreamClient, reply: bytes, kind: BreakKind) -> None:
    async with script(reply, closes=True) as server:
        assert await broken(client, server) is kind
        await until(lambda: server.ended == 1)


async def test_a_long_body_comes_over_tls_too(
    client: UpstreamClient, tls_files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", tls_files[0])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*tls_files)
    async with script(KEPT_LONG, OK, KEPT_LONG, tls=context) as server:
        origin = Origin(tls=True, host="localhost", port=server.port)
        replies = [await client.send(origin, HEAD, b"{}", Exchange()) for _ in range(3)]
        assert [reply.body for reply in replies] == [LONG, b"{}", LONG]
        assert server.connections == 1


async def test_headers_are_told_of_what_is_no_200(client: UpstreamClient) -> None:
    async with script(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n") as server:
        reply = await ask(client, server)
        assert (reply.status, dict(reply.headers)) == (503, {"retry-after": "7", "content-length": "0"})


async def test_a_reply_to_a_request_that_is_not_out_yet_ends_its_connection(client: UpstreamClient) -> None:
    """A server that refuses a large body without reading it: the rest is not worth sending."""
    early = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}"
    go_on, ended = asyncio.Event(), asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(early)
        await writer.drain()
        await go_on.wait()
        with suppress(ConnectionError):
            while await reader.read(2**16):
                pass
        ended.set()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        origin = Origin(tls=False, host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        size = 2**26
        reply = await client.send(origin, HEAD.replace(b": 2", b": %d" % size), bytes(size), Exchange())
        assert reply.status == 413
        go_on.set()
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_a_server_that_speaks_before_it_is_asked_is_not_believed(client: UpstreamClient) -> None:
    """On an idle connection, too: what came early would be taken for the next request's reply."""
    speak, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await speak.wait()
        writer.write(OK.replace(b"{}", b"no"))
        await writer.drain()
        with suppress(ConnectionError):
            await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=False, host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        assert (await client.send(origin, HEAD, b"{}", Exchange())).body == b"{}"
        assert not ended.is_set()
        speak.set()
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_a_break_off_before_the_request_is_sent_changes_nothing(client: UpstreamClient) -> None:
    """D18: what still waits for a connection has not begun at the upstream, and is no interrupted execution."""
    exchange = Exchange()
    exchange.break_off(BreakKind.DRAINING)
    async with script(OK) as server:
        assert (await ask(client, server, exchange)).body == b"{}"
        assert exchange.reply is not None
        exchange.break_off(BreakKind.DRAINING)


async def test_keys_take_turns_at_a_connection_that_all_wait_for() -> None:
    """E4: whoever has a hundred waiting delays another by one of them, and each key's own keep their order."""
    client = own(max_connections=1)
    hold, served = asyncio.Event(), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(2)
            served.append(head.partition(b"Host: ")[2].partition(b"\r\n")[0].decode())
            await hold.wait()
            writer.write(OK)
            if len(served) == 1 + 100 + 3:
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=False, host="127.0.0.1", port=server.sockets[0].getsockname()[1])

        def send(key: str, number: int) -> asyncio.Task[Reply]:
            head = HEAD.replace(b"Host: a", f"Host: {key}{number}".encode())
            return asyncio.create_task(client.send(origin, head, b"{}", Exchange(key_digest=key.encode())))

        tasks = [send("flood", 0)]
        await until(lambda: len(served) == 1)
        tasks += [send("flood", number) for number in range(1, 101)]
        await until(lambda: "100 waiting" in repr(client))
        tasks += [send("quiet", number) for number in range(3)]
        await until(lambda: "103 waiting" in repr(client))
        hold.set()
        await asyncio.gather(*tasks)
    assert served[:7] == ["flood0", "flood1", "quiet0", "flood2", "quiet1", "flood3", "quiet2"]
    assert served[7:] == [f"flood{number}" for number in range(4, 101)]
    await client.close()


async def test_who_gave_up_waiting_is_forgotten_and_costs_its_key_no_turn() -> None:
    client = own(max_connections=1)
    hold, served = asyncio.Event(), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(1 + 20 + 3):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            served.append(head.partition(b"Host: ")[2].partition(b"\r\n")[0].decode())
            await hold.wait()
            writer.write(OK)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=False, host="127.0.0.1", port=server.sockets[0].getsockname()[1])

        def send(key: str, count: int) -> list[asyncio.Task[Reply]]:
            head = HEAD.replace(b"Host: a", f"Host: {key}".encode())
            exchanges = [Exchange(key_digest=key.encode()) for _ in range(count)]
            return [asyncio.create_task(client.send(origin, head, b"{}", exchange)) for exchange in exchanges]

        tasks = send("A", 1)
        await until(lambda: len(served) == 1)
        gone = send("A", 1_000)
        tasks += send("B", 20)
        await until(lambda: "1020 waiting" in repr(client))
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert "20 waiting" in repr(client)
        tasks += send("A", 3)
        await until(lambda: "23 waiting" in repr(client))
        hold.set()
        await asyncio.gather(*tasks)
    assert served[1:7] == ["B", "A"] * 3
    await client.close()


class Echo:
    """Answers whatever it is asked, and notes its name in `served`, which it shares with others; `hold` stops it."""

    def __init__(self, name: str, served: list[str], hold: asyncio.Event) -> None:
        self._name, self._served, self._hold = name, served, hold
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                self._served.append(self._name)
                await self._hold.wait()
                writer.write(OK)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def echoes(*names: str) -> AsyncIterator[tuple[list[Echo], list[Origin], list[str], asyncio.Event]]:
    served: list[str] = []
    hold = asyncio.Event()
    made = [Echo(name, served, hold) for name in names]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(echo.serve, "127.0.0.1", 0)) for echo in made
        ]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        yield made, [Origin(tls=False, host="127.0.0.1", port=port) for port in ports], served, hold


def sends(client: UpstreamClient, origin: Origin, count: int) -> list[asyncio.Task[Reply]]:
    return [asyncio.create_task(client.send(origin, HEAD, b"{}", Exchange())) for _ in range(count)]


async def test_idle_connections_to_one_upstream_make_room_for_another() -> None:
    """The oldest, one for each that waits; no more are closed than are needed."""
    client = own(max_connections=3)
    async with echoes("x", "y") as ((x, y), (to_x, to_y), _, hold):
        hold.set()
        await asyncio.gather(*sends(client, to_x, 3))
        assert "3 open, 3 idle" in repr(client)
        await asyncio.gather(*sends(client, to_y, 1))
        assert "3 open, 3 idle, 0 waiting" in repr(client)
        await asyncio.gather(*sends(client, to_x, 2))
        assert (x.connections, y.connections) == (3, 1)
        await client.close()


async def test_an_upstream_that_none_is_connected_to_waits_for_one_of_anothers_queue_and_not_for_all() -> None:
    client = own(max_connections=1)
    async with echoes("x", "y", "z") as (_, (to_x, to_y, to_z), served, hold):
        tasks = sends(client, to_x, 1)
        await until(lambda: len(served) == 1)
        for origin, count in ((to_x, 20), (to_y, 1), (to_z, 2)):
            tasks += sends(client, origin, count)
        await until(lambda: "23 waiting" in repr(client))
        hold.set()
        await asyncio.gather(*tasks)
        assert served == [*"xyzxz", *"x" * 19]
        await client.close()


async def test_upstreams_with_queues_come_to_even_shares_and_then_keep_their_connections() -> None:
    client = own(max_connections=8)
    async with echoes("x", "y") as ((x, y), (to_x, to_y), served, hold):
        tasks = sends(client, to_x, 8)
        await until(lambda: len(served) == 8)
        tasks += sends(client, to_x, 100) + sends(client, to_y, 100)
        await until(lambda: "200 waiting" in repr(client))
        hold.set()
        await asyncio.gather(*tasks)
        assert set(served[:16]) == {"x", "y"}
        assert x.connections + y.connections < 24
        await client.close()


@pytest.mark.parametrize("limits", [{"limit": 2}, {"limit_per_origin": 2}])
async def test_places_are_kept_through_every_way_of_ending(limits: dict[str, int]) -> None:
    """Cut, cancelled while waiting, cancelled while running, refused: after all of it both places are free again."""
    client = own(max_connections=limits.get("limit", 0))
    client._limit_per_origin = limits.get("limit_per_origin", 0)
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"cut" not in head:
                await hold.wait()
                writer.write(OK)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=False, host="127.0.0.1", port=server.sockets[0].getsockname()[1])

        def send(head: bytes = HEAD, to: Origin = origin) -> asyncio.Task[Reply]:
            return asyncio.create_task(client.send(to, head, b"{}", Exchange()))

        running = [send() for _ in range(2)]
        await until(lambda: "2 open" in repr(client))
        waiting = [send() for _ in range(6)]
        await until(lambda: "6 waiting" in repr(client))
        for task in (*waiting[:3], running[0]):
            task.cancel()
        waiting += [send(HEAD.replace(b"a\r\n", b"cut\r\n")) for _ in range(3)]
        # Nothing is listening on port 1: it waits for a place, and gives it back at once.
        waiting += [send(to=origin._replace(port=1)) for _ in range(3)]
        hold.set()
        outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
        kinds = [type(outcome).__name__ for outcome in outcomes]
        assert kinds == ["CancelledError", "Reply", *["CancelledError"] * 3, *["Reply"] * 3, *["Broken"] * 6]
        await until(lambda: "<OwnClient 0 open, 0 idle, 0 waiting>" in repr(client))
        assert (await asyncio.gather(*(send() for _ in range(5))))[4].body == b"{}"
    await client.close()
