"""Hot paths: the same replies as by the application, refusals before the body, turns, and how a connection ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from shared.http.head import HttpLimits
from shared.http.reply import send_response
from tests.garbage import garbage
from tests.integration.http.edge_server import Application, Client, Said, Served, request, serving_app, status_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from shared.core.errors import GatewayError
    from shared.http.exchange import Exchange

KIB = 1024
LARGE = bytes(range(256)) * 256
MOST_BYTES = 400 * KIB
# More than the lane starts in one turn.
CROWD = 50


@dataclass
class Route:
    """Answers with the body. `held`: not before that is set. An `X-Stranger` is refused."""

    in_turns = True
    admitted: int = 0
    bodies: list[bytes] = field(default_factory=list)
    delivered: int = 0
    gone: list[str] = field(default_factory=list)
    refused: list[GatewayError] = field(default_factory=list)
    held: asyncio.Event | None = None
    parts: Callable[[Scope, Send], Awaitable[None]] | None = None
    scopes: list[Scope] = field(default_factory=list)

    def admit(self, exchange: Exchange) -> None:
        self.admitted += 1
        if b"x-stranger" in exchange.headers:
            exchange.reply(401, b"text/plain", f"{exchange.path}: who are you?".encode())
        else:
            exchange.collect(self, MOST_BYTES)

    async def answer(self, exchange: Exchange, body: bytes) -> Said | None:
        self.bodies.append(body)
        self.scopes.append(exchange.scope())
        if self.held is not None:
            await self.held.wait()
        if self.parts is not None:
            await self.parts(exchange.scope(), exchange.send)
            return None
        return Said(200, body, on_delivered=self._count)

    def refuse(self, exchange: Exchange, error: GatewayError) -> None:
        self.refused.append(error)
        exchange.reply(413, b"text/plain", b"too large")

    def client_left(self, exchange: Exchange) -> None:
        self.gone.append(exchange.path)

    def _count(self) -> None:
        self.delivered += 1


@dataclass
class Bench:
    served: Served
    app: Application
    route: Route

    async def connect(self) -> Client:
        return await self.served.connect()

    async def ask(self, data: bytes, replies: int = 1) -> bytes:
        client = await self.connect()
        await client.send(data)
        told = await read_replies(client, replies)
        client.close()
        return told


@asynccontextmanager
async def direct(limits: HttpLimits | None = None) -> AsyncIterator[Bench]:
    app, route = Application(), Route()
    async with serving_app(app, limits, hot={(b"POST", b"/echo"): route}) as served:
        try:
            yield Bench(served, app, route)
        finally:
            app.release.set()
            if route.held is not None:
                route.held.set()


async def read_replies(client: Client, count: int) -> bytes:
    """So many whole replies with a length."""
    data, rest = b"", b""
    for _ in range(count):
        while b"\r\n\r\n" not in rest:
            rest += await read_some(client)
        head, _, rest = rest.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(rest) < length:
            rest += await read_some(client)
        data += head + b"\r\n\r\n" + rest[:length]
        rest = rest[length:]
    assert not rest
    return data


async def read_some(client: Client) -> bytes:
    piece = await client.read()
    assert piece, "closed"
    return piece


@pytest.mark.parametrize("body", [b"x", b"{}", LARGE])
async def test_the_reply_is_that_of_asgi(body: bytes) -> None:
    async with direct() as bench:
        ours = await bench.ask(request("POST", "/echo", body))
        # With a query it is not in the table.
        theirs = await bench.ask(request("POST", "/echo?", body))
        assert bench.route.bodies == bench.app.bodies == [body]
    mine = sorted(line for line in ours.partition(b"\r\n\r\n")[0].lower().split(b"\r\n") if b"content-type" not in line)
    assert mine == sorted(theirs.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"))
    assert ours.endswith(body) and theirs.endswith(body)


@pytest.mark.parametrize("data", [request("POST", "/other", b"{}"), request("PUT", "/echo", b"{}")])
async def test_what_is_not_in_the_table_goes_to_the_application(data: bytes) -> None:
    async with direct() as bench:
        client = await bench.connect()
        await client.send(data)
        await until(lambda: len(bench.app.bodies) == 1, "the application has it")
        assert not bench.route.admitted
        client.close()


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (request("POST", "/echo", b"{}", "Expect: 100-continue"), b"{}"),
        (request("POST", "/echo"), b""),
        (request("POST", "/echo", b"", "Content-Length: 0"), b""),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"POST /echo HTTP/1.0\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
        (request("POST", "/echo", bytes(300 * KIB)), bytes(300 * KIB)),
    ],
    ids=["expect", "no body", "empty body", "chunked", "1.0", "long body"],
)
async def test_every_form_of_a_request_takes_the_same_way(data: bytes, body: bytes) -> None:
    async with direct() as bench:
        client = await bench.connect()
        head, _, rest = data.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        if b"Expect" in data:
            await client.read_until(b"100 Continue\r\n\r\n")
        await client.send(rest)
        told = await read_replies(client, 1)
        assert told.endswith(b"\r\n\r\n" + body)
        assert (bench.route.bodies, bench.app.bodies) == ([body], [])
        client.close()


async def test_a_chunked_body_is_refused_when_it_becomes_too_large() -> None:
    chunk = b"8000\r\n" + bytes(0x8000) + b"\r\n"
    async with direct() as bench:
        client = await bench.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 40)
        told = await client.read_to_end()
        assert (status_of(told), b"connection: close" in told) == (413, True)
        assert (len(bench.route.refused), bench.route.bodies) == (1, [])
        client.close()


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_request_in_pieces(step: int) -> None:
    body = b"0123456789" * 200
    data = request("POST", "/echo", body, "X-A: b")
    async with direct() as bench:
        client = await bench.connect()
        for at in range(0, len(data), step):
            await client.send(data[at : at + step])
        assert (await read_replies(client, 1)).endswith(body)
        assert bench.route.bodies == [body]
        client.close()


async def test_a_connection_is_used_again_by_either_way() -> None:
    async with direct() as bench:
        client = await bench.connect()
        for number in range(6):
            path = "/echo" if number % 2 else "/echo?"
            await client.send(request("POST", path, b"%d" % number))
            assert (await read_replies(client, 1)).endswith(b"%d" % number)
        assert (bench.route.bodies, bench.app.bodies) == ([b"1", b"3", b"5"], [b"0", b"2", b"4"])
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with direct() as bench:
        data = b"".join(request("POST", "/echo", b"%d" % number) for number in range(5))
        told = await bench.ask(data, 5)
        assert [part[-1:] for part in told.split(b"HTTP/1.1 200 OK")[1:]] == [b"0", b"1", b"2", b"3", b"4"]
        assert bench.route.bodies == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_stranger_is_refused_before_the_body_and_may_try_again() -> None:
    async with direct() as bench:
        client = await bench.connect()
        head, body = request("POST", "/echo", bytes(100 * KIB), "X-Stranger: yes").split(b"\r\n\r\n", 1)
        await client.send(head + b"\r\n\r\n")
        told = await read_replies(client, 1)
        assert status_of(told) == 401 and told.endswith(b"/echo: who are you?")
        await client.send(body)
        await client.send(request("POST", "/echo", b"mine"))
        assert (await read_replies(client, 1)).endswith(b"mine")
        assert bench.route.bodies == [b"mine"]
        client.close()


@pytest.mark.parametrize("asks", ["Connection: close", "Expect: 100-continue"])
async def test_a_last_refusal_is_not_lost_with_the_body_that_it_did_not_wait_for(asks: str) -> None:
    """Nor where the client asks whether to send the body, and sends it without waiting for the answer."""
    data = request("POST", "/echo", bytes(60 * KIB), "X-Stranger: yes", asks)
    async with direct() as bench:
        client = bench.served.connect_saying(data[: 40 * KIB])
        assert (await client.read_to_the_goodbye()).endswith(b"/echo: who are you?")
        assert await client.send(data[40 * KIB :])
        await until(lambda: not bench.served.edge.open, "the body was whole")
        client.close()


@pytest.mark.parametrize("asks", ["Connection: close", "Expect: 100-continue"])
async def test_a_body_that_does_not_come_after_the_last_refusal_is_not_waited_for(asks: str) -> None:
    data = request("POST", "/echo", bytes(60 * KIB), "X-Stranger: yes", asks)
    async with direct() as bench:
        client = bench.served.connect_saying(data[:KIB])
        assert status_of(await client.read_to_the_goodbye()) == 401
        bench.served.sweep_after(HttpLimits().linger_s)
        await until(lambda: not bench.served.edge.open, "cut")
        client.close()


async def test_a_flood_of_strangers_in_one_turn_is_refused_as_by_asgi() -> None:
    async with direct() as bench:
        client = bench.served.connect_saying(request("POST", "/echo", b"{}", "X-Stranger: yes") * 170)
        told = await client.read_to_end()
        most = HttpLimits().pipelined
        assert (told.count(b"HTTP/1.1 401"), told.count(b"HTTP/1.1 400")) == (most, 1)
        client.close()


async def test_what_was_sent_behind_a_last_refusal_is_no_request() -> None:
    async with direct() as bench:
        bench.served.edge.start_draining()
        refused = request("POST", "/echo", b"theirs", "X-Stranger: yes")
        client = bench.served.connect_saying(refused + request("POST", "/echo", b"mine"))
        assert (await client.read_to_end()).count(b"HTTP/1.1 ") == 1
        await until(lambda: not bench.served.edge.open, "closed")
        assert (bench.route.admitted, bench.route.bodies, bench.app.scopes) == (1, [], [])
        client.close()


async def test_a_crowd_is_answered_whole() -> None:
    async with direct() as bench:
        replies = await asyncio.gather(*(bench.ask(request("POST", "/echo", b"%d" % n)) for n in range(CROWD)))
        assert [reply.rpartition(b"\r\n\r\n")[2] for reply in replies] == [b"%d" % n for n in range(CROWD)]
        await until(lambda: bench.route.delivered == CROWD, "all delivered")


async def test_a_client_that_leaves_while_it_is_held_took_nothing() -> None:
    async with direct() as bench:
        bench.route.held = asyncio.Event()
        client = await bench.connect()
        await client.send(request("POST", "/echo", b"{}"))
        await until(lambda: len(bench.route.bodies) == 1, "held")
        client.close()
        await until(lambda: not bench.served.edge.open, "closed")
        bench.route.held.set()
        await bench.ask(request("POST", "/echo", b"next"))
        await until(lambda: bench.route.delivered == 1, "the next one")
        assert bench.route.gone == []


@pytest.mark.parametrize("sent", [b"", b"half of it"])
async def test_a_client_that_leaves_within_its_body_is_counted(sent: bytes) -> None:
    async with direct() as bench:
        client = await bench.connect()
        head = request("POST", "/echo", bytes(1000)).partition(b"\r\n\r\n")[0]
        await client.send(head + b"\r\n\r\n" + sent)
        await until(lambda: bench.route.admitted == 1, "admitted")
        client.close()
        await until(lambda: bench.route.gone == ["/echo"], "noticed")
        assert bench.route.bodies == []


async def test_a_body_that_trickles_is_refused_in_time() -> None:
    async with direct(HttpLimits(body_grace_s=5.0)) as bench:
        client = await bench.connect()
        head = request("POST", "/echo", bytes(1000)).partition(b"\r\n\r\n")[0]
        await client.send(head + b"\r\n\r\nx")
        await until(lambda: bool(bench.served.edge.arriving), "begun")
        bench.served.sweep_after(60.0)
        assert status_of(await client.read_to_end()) == 408
        assert bench.route.bodies == []
        client.close()


async def test_a_reply_may_come_in_parts() -> None:
    async def parts(scope: Scope, send: Send) -> None:
        await send_response(send, 503, [(b"x-path", scope["raw_path"])], b"later")

    async with direct() as bench:
        bench.route.parts = parts
        told = await bench.ask(request("POST", "/echo", b"{}") * 2, 2)
        assert told.count(b"HTTP/1.1 503") == 2 and told.count(b"x-path: /echo") == 2 and told.endswith(b"later")


async def test_a_defect_closes_the_connection() -> None:
    async def broken(scope: Scope, send: Send) -> None:
        raise RuntimeError("a defect")

    async with direct() as bench:
        bench.route.parts = broken
        assert status_of(await bench.served.exchange(request("POST", "/echo", b"{}", "Connection: close"))) == 500


@pytest.mark.parametrize("path", ["/echo", "/echo?"])
async def test_a_connection_leaves_nothing_for_the_garbage_collector(path: str) -> None:
    async with direct() as bench:
        with garbage() as left:
            for _ in range(3):
                await bench.ask(request("POST", path, b"{}"))
            await until(lambda: not bench.served.edge.open, "closed")
        found = {type(item).__name__ for item in left}
        assert not {name for name in found if "Exchange" in name or "Parser" in name or "Connection" in name}


async def test_an_application_that_is_a_function_serves_many_connections() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_response(send, 200, [], b"fine")

    async with serving_app(app) as served:
        for _ in range(3):
            assert (await served.exchange(request("GET", "/", b"", "Connection: close"))).endswith(b"fine")


async def test_an_idle_connection_does_not_keep_its_last_body() -> None:
    async with direct() as bench:
        client = await bench.connect()
        await client.send(request("POST", "/echo", LARGE))
        await read_replies(client, 1)
        await until(lambda: bench.route.delivered == 1, "delivered")
        connection = next(iter(bench.served.edge.open))
        assert connection._answering.body == b""  # type: ignore[attr-defined] # a protocol
        client.close()


async def test_a_scope_tells_what_asgi_tells() -> None:
    async with direct() as bench:
        await bench.ask(request("POST", "/echo", b"{}", "X-A: 1", "X-A: 2"))
        await bench.ask(request("POST", "/echo?", b"{}", "X-A: 1", "X-A: 2"))
        ours, theirs = bench.route.scopes[0], bench.app.scopes[0]
        assert ours["raw_path"] + b"" == b"/echo" and ours["path"] == "/echo"
        same = ours.keys() - {"extensions"}
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


async def test_a_server_that_stops_answers_those_in_the_lane_and_says_goodbye() -> None:
    async with direct() as bench:
        clients = [await bench.connect() for _ in range(CROWD)]
        for client in clients:
            await client.send(request("POST", "/echo", b"{}"))
        await until(lambda: bench.route.admitted == CROWD, "all have come")
        await bench.served.server.stop(10.0)
        for client in clients:
            assert status_of(await client.read_to_end()) == 200
            client.close()


async def test_a_request_that_comes_while_the_server_drains_is_the_last() -> None:
    async with direct() as bench:
        client = await bench.connect()
        await client.send(request("POST", "/echo", b"1"))
        await read_replies(client, 1)
        bench.served.edge.start_draining()
        await client.send(request("POST", "/echo", b"2"))
        told = await client.read_to_end()
        assert b"connection: close" in told and told.endswith(b"2")
        client.close()


async def test_too_many_headers_in_one_small_read() -> None:
    async with direct() as bench:
        client = await bench.connect()
        await client.send(request("POST", "/echo", b"{}", *(f"X-{n}: 1" for n in range(200))))
        assert status_of(await client.read_to_end()) == 431
        assert not bench.route.admitted
        client.close()
