"""Every way in which an exchange with an upstream can end, over real sockets: each has a name, none is an exception."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shared.core.faults import BreakKind, Fault, FaultClass
from shared.core.upstream_protocol import ClientChoice
from tests.garbage import garbage
from tests.integration.upstream.lines import line
from tests.waiting import DEADLINE_S, until
from workers.upstream.client.connection import UpstreamConnection
from workers.upstream.client.port import Broken, Exchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from aiohttp.connector import AddrInfoType

    from gateway.simulator.simulator import Simulator
    from shared.core.upstream_protocol import ProtocolChoice
    from workers.upstream.client.dial import Resolve

pytestmark = pytest.mark.usefixtures("both_clients")


@contextmanager
def bound() -> Iterator[socket.socket]:
    """An address that does not listen: it refuses."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def url_of(sock: socket.socket, scheme: str = "http", host: str = "127.0.0.1") -> str:
    return f"{scheme}://{host}:{sock.getsockname()[1]}"


@asynccontextmanager
async def server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that does what is asked of it with every connection, and closes it."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    started = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield url_of(started.sockets[0])
    finally:
        started.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- whole replies ----------------------------------------------------------------------------------------------------


async def test_a_reply_is_its_body(simulator: Simulator, protocol: ProtocolChoice) -> None:
    async with line(simulator.url, protocol=protocol) as made:
        reply = await made.ask()
        assert isinstance(reply, bytes)
        assert json.loads(reply)["choices"][0]["finish_reason"] == "length"
        assert not made.upstream.attempts


@pytest.mark.parametrize(
    ("status", "more", "kind", "down"),
    [
        (503, {"headers": {"Retry-After": "7"}}, FaultClass.NEVER_EXECUTED, False),
        (429, {}, FaultClass.NEVER_EXECUTED, False),
        (408, {}, FaultClass.NEVER_EXECUTED, False),
        (500, {"body": "EngineCore encountered an issue"}, FaultClass.INTERRUPTED, True),
        (502, {}, FaultClass.AMBIGUOUS, False),
        (400, {"body": {"error": {"message": "no"}}}, FaultClass.REFUSED, False),
        (302, {"headers": {"Location": "http://127.0.0.1:1/"}}, FaultClass.REFUSED, False),
    ],
)
async def test_other_statuses_are_faults(
    simulator: Simulator, status: int, more: dict[str, Any], kind: FaultClass, down: bool, protocol: ProtocolChoice
) -> None:
    simulator.set_faults([{"kind": "status", "status": status, **more}])
    async with line(simulator.url, protocol=protocol) as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (kind, down)
        assert fault.retry_after_s == (7.0 if status == 503 else None)


# -- broken exchanges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misbehaviour", "kind", "down"),
    [
        ("reset_before_read", FaultClass.INTERRUPTED, True),
        ("reset_before_status", FaultClass.INTERRUPTED, True),
        ("reset_after_headers", FaultClass.AMBIGUOUS, False),
        ("reset_in_body", FaultClass.AMBIGUOUS, False),
    ],
)
async def test_a_connection_that_is_cut(
    simulator: Simulator, misbehaviour: str, kind: FaultClass, down: bool, protocol: ProtocolChoice
) -> None:
    simulator.set_faults([{"kind": misbehaviour}])
    async with line(simulator.url, protocol=protocol) as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (kind, down)
        assert simulator.url in fault.for_operators and simulator.url not in fault.message


async def test_a_connection_that_is_refused() -> None:
    with bound() as closed:
        async with line(url_of(closed)) as made:
            fault = await made.fault()
            assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, True)
            assert BreakKind.CONNECT_REFUSED.value in fault.message
            assert made.upstream.refused_since_s is not None


async def several(host: str, port: int) -> list[AddrInfoType]:
    """A name server that knows two addresses for every name."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")]


async def no_names(host: str, port: int) -> list[AddrInfoType]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_a_refusal_by_all_addresses_of_a_name_is_a_refusal() -> None:
    """D18: an upstream given by a name that has several addresses."""
    with bound() as closed:
        async with line(url_of(closed, host="several.test"), several) as made:
            fault = await made.fault()
            assert BreakKind.CONNECT_REFUSED.value in fault.message
            assert made.upstream.refused_since_s is not None


async def test_an_address_that_refuses_is_not_the_last_word_on_its_name(simulator: Simulator) -> None:
    """The simulator listens on the first of the two addresses only, and they are taken in turn."""
    async with line(simulator.url.replace("127.0.0.1", "several.test"), several) as made:
        assert all([isinstance(await made.ask(), bytes) for _ in range(3)])


async def no_name(host: str, port: int) -> list[AddrInfoType]:
    raise UnicodeError("label empty or too long")


@pytest.mark.parametrize("resolve", [no_names, no_name])
async def test_a_name_that_nobody_knows(resolve: Resolve) -> None:
    async with line("http://no-such-host.test:1", resolve) as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, True)
        assert BreakKind.DNS.value in fault.message


async def test_a_connection_that_is_never_accepted() -> None:
    """A full backlog: the kernel drops what comes."""
    with bound() as listening:
        listening.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
            fillers.append(filler)
        async with line(url_of(listening), connect_timeout_s=0.1) as made:
            fault = await made.fault()
            assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, True)
            assert BreakKind.CONNECT_TIMEOUT.value in fault.message
            assert made.upstream.refused_since_s is None
        for filler in fillers:
            filler.close()


async def test_a_server_without_tls(simulator: Simulator) -> None:
    async with line(simulator.url.replace("http:", "https:")) as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, True)


async def test_an_upstream_that_never_answers(simulator: Simulator, protocol: ProtocolChoice) -> None:
    """A15: final at the deadline, and the generation is given up."""
    simulator.set_faults([{"kind": "hang"}])
    async with line(simulator.url, read_timeout_s=0.1, protocol=protocol) as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (FaultClass.AMBIGUOUS, False)
        assert BreakKind.READ_TIMEOUT.value in fault.message
        await until(lambda: simulator.stats()["aborted"] == 1)


@pytest.mark.parametrize(
    ("settings", "is_whole"),
    [
        # A reply that takes longer than the longest silence, and is never silent for so long.
        ({"read_timeout_s": 0.5, "attempt_timeout_s": 30.0}, True),
        ({"read_timeout_s": 0.5}, False),
        ({"read_timeout_s": 30.0, "attempt_timeout_s": 0.5}, False),
    ],
)
async def test_a_reply_that_arrives_slowly_is_bounded_as_a_whole(settings: dict[str, Any], is_whole: bool) -> None:
    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n")
        for _ in range(14):
            writer.write(b" ")
            await asyncio.sleep(0.1)  # the time that passes is what is tested
        await reader.read()

    async with server(dribble) as url, line(url, **settings) as made:
        reply = await made.ask()
        if is_whole:
            assert reply == b" " * 14
        else:
            assert isinstance(reply, Fault)
            assert BreakKind.READ_TIMEOUT.value in reply.message


@pytest.mark.parametrize("kind", ["reset_before_status", "reset_in_body", "refused"])
async def test_what_broke_leaves_nothing_for_the_garbage_collector(
    simulator: Simulator, kind: str, both_clients: ClientChoice
) -> None:
    if both_clients is ClientChoice.AIOHTTP:
        pytest.skip("aiohttp's own objects refer to each other in cycles")
    if kind != "refused":
        simulator.set_faults([{"kind": kind}])
    with bound() as nobody:
        async with line(url_of(nobody) if kind == "refused" else simulator.url) as made:
            await made.fault()
            with garbage() as found:
                for _ in range(3):
                    await made.fault()
                await asyncio.sleep(0)
            assert not [item for item in found if isinstance(item, OSError | Broken | Exchange | UpstreamConnection)]


async def test_what_is_not_http() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()

    async with server(babble) as url, line(url) as made:
        fault = await made.fault()
        assert fault.kind in (FaultClass.AMBIGUOUS, FaultClass.INTERRUPTED)
        assert url in fault.for_operators and url not in fault.message


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
@pytest.mark.parametrize("length", ["Content-Length: 1000000000", "X-Length: none"])
async def test_a_reply_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch, status: str, length: str) -> None:
    monkeypatch.setattr("workers.upstream.connector.LARGEST_RESULT_BYTES", 2**20)
    gone = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\n{length}\r\n\r\n".encode())
        try:
            while True:
                writer.write(b"x" * 2**16)
                await writer.drain()
        finally:
            gone.set()

    async with server(flood) as url, line(url) as made:
        fault = await made.fault()
        expected = FaultClass.REFUSED if status.startswith("200") else FaultClass.AMBIGUOUS
        assert fault.kind is expected
        await asyncio.wait_for(gone.wait(), DEADLINE_S)


async def test_an_idle_connection_that_the_upstream_closed_is_not_used_again() -> None:
    """B4: the end of an idle connection is seen before the next request is written."""
    connections: list[asyncio.StreamWriter] = []
    closed = asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with server(once) as url, line(url) as made:
        for count in range(1, 4):
            closed.clear()
            assert await made.ask() == b"{}"
            await closed.wait()
            assert len(connections) == count


async def test_the_workers_own_limits_are_not_the_upstreams_fault(simulator: Simulator) -> None:
    """An address that this machine does not have is EADDRNOTAVAIL, as are ports that are used up."""
    async with line(simulator.url, source_ip="192.0.2.1") as made:
        fault = await made.fault()
        assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, False)
