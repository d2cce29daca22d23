"""Every way in which an exchange with an upstream can end, over real sockets: each has a name, none is an exception."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from shared.clock import ManualClock
from shared.core.faults import BreakKind, Fault, FaultClass
from shared.core.lifecycle import State
from shared.core.upstream_protocol import ProtocolChoice
from shared.histogram import count
from tests.garbage import garbage
from tests.integration.upstream.lines import Line, line
from tests.waiting import DEADLINE_S, until
from workers import upstreams
from workers.h1.connection import UpstreamConnection
from workers.h1.exchange import Broken, Exchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from aiohttp.connector import AddrInfoType

    from workers.h1.dial import Resolve
    from workers.upstreams import Upstream


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator(SimulatorConfig()) as made:
        yield made


@pytest.fixture(params=[ProtocolChoice.COMPLETIONS, ProtocolChoice.GENERATE], ids=lambda choice: choice.value)
def protocol(request: pytest.FixtureRequest) -> ProtocolChoice:
    """What goes wrong is the same by either."""
    chosen: ProtocolChoice = request.param
    return chosen


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
        assert simulator.url in fault.message


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


@pytest.mark.parametrize("kind", ["reset_before_status", "reset_in_body", "refused"])
async def test_what_broke_leaves_nothing_for_the_garbage_collector(simulator: Simulator, kind: str) -> None:
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
        assert url in fault.message


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
@pytest.mark.parametrize("length", ["Content-Length: 1000000000", "X-Length: none"])
async def test_a_reply_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch, status: str, length: str) -> None:
    monkeypatch.setattr("workers.connector.LARGEST_RESULT_BYTES", 2**20)
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


async def test_the_workers_own_limits_are_not_the_upstreams_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound() as closed:
        async with line(url_of(closed)) as made:
            monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EADDRNOTAVAIL)
            fault = await made.fault()
            assert (fault.kind, fault.upstream_down) == (FaultClass.NEVER_EXECUTED, False)


# -- ending an exchange from this side --------------------------------------------------------------------------------


async def test_a_cancel_closes_the_upstream_connection(simulator: Simulator) -> None:
    """D7"""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        await until(lambda: simulator.stats()["aborted"] == 1)
        assert simulator.stats()["in_flight"] == 0
        assert not made.upstream.attempts


async def test_a_break_off_is_a_fault_and_closes_the_connection(simulator: Simulator) -> None:
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        (attempt,) = made.upstream.attempts
        attempt.break_off(BreakKind.DRAINING)
        attempt.break_off(BreakKind.READ_TIMEOUT)
        fault = await exchange
        assert isinstance(fault, Fault)
        assert (fault.kind, fault.upstream_down) == (FaultClass.INTERRUPTED, True)
        await until(lambda: simulator.stats()["aborted"] == 1)


@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_cancel_is_not_lost_in_a_break_off(simulator: Simulator, cancel_first: bool) -> None:
    """D7: both in one turn of the loop; a client's cancel must not end as one more execution."""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        (attempt,) = made.upstream.attempts
        if cancel_first:
            exchange.cancel()
        attempt.break_off(BreakKind.DRAINING)
        if not cancel_first:
            exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange


async def test_an_upstream_that_drains_is_noticed_by_the_probe(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18: old connections open without a byte, new ones refused; not a moment before it has refused for long."""
    # It answered a probe a moment ago, and is not believed for it.
    monkeypatch.setattr(upstreams, "_QUIET_S", 0.0)
    async with line(simulator.url) as made:
        simulator.set_faults([{"kind": "hold"}])
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        await made.pool.probe()
        assert not refuses(made.upstream)
        simulator.set_faults([{"kind": "drain"}])
        await made.pool.probe()
        assert refuses(made.upstream)
        assert not exchange.done()
        monkeypatch.setattr(upstreams, "REFUSED_FOR_S", 0.0)
        await made.pool.probe()
        fault = await exchange
        assert isinstance(fault, Fault)
        assert fault.kind is FaultClass.INTERRUPTED
        assert BreakKind.DRAINING.value in fault.message


async def test_what_waits_for_a_connection_is_not_interrupted_by_a_break_off(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18: it was never executed, and may be sent elsewhere as often as needed."""
    monkeypatch.setattr(upstreams, "REFUSED_FOR_S", 0.0)
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url, max_connections=1) as made:
        held = asyncio.create_task(made.ask("held-a1"))
        await until(lambda: simulator.stats()["in_flight"] == 1)
        queued = asyncio.create_task(made.ask("queued-a1"))
        await until(lambda: len(made.upstream.attempts) == 2)
        simulator.set_faults([{"kind": "drain"}])
        await made.pool.probe()
        faults = await asyncio.gather(held, queued)
        assert all(isinstance(fault, Fault) for fault in faults), faults
        assert [fault.kind for fault in faults] == [FaultClass.INTERRUPTED, FaultClass.NEVER_EXECUTED]  # type: ignore[union-attr] # see above


async def test_a_probe_does_not_wait_behind_samples(simulator: Simulator) -> None:
    """D18: with every connection in use, a drain is noticed all the same."""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url, max_connections=1) as made:
        exchanges = [asyncio.create_task(made.ask()) for _ in range(3)]
        await until(lambda: simulator.stats()["in_flight"] == 1)
        await made.pool.learn_models()
        assert made.pool.catalogue.known
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)


def refuses(upstream: Upstream) -> bool:
    return upstream.refused_since_s is not None


# -- the pool of connections ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_waiting_for_a_connection_is_charged_to_nobody() -> None:
    """A4: two requests for a pool of one connection, each longer than the deadline for connecting."""
    async with (
        Simulator(SimulatorConfig(mode="latency", gen_seconds=0.8)) as simulator,
        line(simulator.url, max_connections=1, connect_timeout_s=0.5, read_timeout_s=1.5) as made,
    ):
        replies = await asyncio.gather(*(made.ask(f"r{number}-a1") for number in range(3)))
        assert all(isinstance(reply, bytes) for reply in replies), replies
        assert simulator.stats()["peak_in_flight"] == 1


async def test_requests_cancelled_while_queued_take_no_connection_with_them(simulator: Simulator) -> None:
    """B3"""
    simulator.set_faults([{"kind": "hold", "next": 10}])
    async with line(simulator.url, max_connections=10) as made:
        holding = [asyncio.create_task(made.ask(f"h{number}-a1")) for number in range(10)]
        await until(lambda: simulator.stats()["in_flight"] == 10)
        queued = [asyncio.create_task(made.ask(f"q{number}-a1")) for number in range(1000)]
        await until(lambda: len(made.upstream.attempts) == 1010)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        replies = await asyncio.gather(*(made.ask(f"n{number}-a1") for number in range(10)))
        assert all(isinstance(reply, bytes) for reply in replies), replies
        assert not made.upstream.attempts
        assert simulator.stats()["received"] == 20


@pytest.mark.slow
async def test_requests_at_the_brink_of_an_idle_connections_end_are_executed_once() -> None:
    """B4, scaled down: the upstream closes after 0.5 s, the gateway after 0.3 s; requests come in between."""
    async with (
        Simulator(SimulatorConfig(keep_alive_s=0.5)) as simulator,
        line(simulator.url, upstream_keep_alive_s=0.3) as made,
    ):
        count = 0
        for pause_s in (0.28, 0.299, 0.3, 0.301, 0.32, 0.48, 0.499, 0.5, 0.501, 0.52):
            states = await asyncio.gather(*(made.execute(count + number) for number in range(4)))
            assert states == [State.READY] * 4
            count += 4
            # What is tested is what becomes of connections that were idle for just so long.
            await asyncio.sleep(pause_s)
        assert simulator.stats()["executions"] == count
        assert made.counters.attempts == count


# -- where the time goes ----------------------------------------------------------------------------------------------


async def release(made: Line, simulator: Simulator) -> None:
    async with made.probes.post(simulator.url + "/_sim/release") as response:
        assert response.status == 200


async def test_waiting_for_a_connection_is_not_the_upstreams_time(simulator: Simulator) -> None:
    simulator.set_faults([{"kind": "hold", "next": 2}])
    clock = ManualClock()
    async with line(simulator.url, clock=clock, max_connections=1) as made:
        first, second = (asyncio.create_task(made.ask(f"r{number}-a1")) for number in range(2))
        await until(lambda: len(made.upstream.attempts) == 2 and simulator.stats()["in_flight"] == 1)
        clock.advance(10.0)
        await release(made, simulator)
        await first
        await until(lambda: simulator.stats()["in_flight"] == 1)
        clock.advance(3.0)
        await release(made, simulator)
        await second
        assert count(made.upstream.queue.snapshot()) == count(made.upstream.latency.snapshot()) == 2
        assert made.upstream.queue.snapshot()[-1] == 10.0
        assert made.upstream.latency.snapshot()[-1] == 13.0
        assert made.upstream.wasted_s == 0.0


async def test_what_was_cut_off_is_wasted_and_what_only_waited_is_not(simulator: Simulator) -> None:
    """B7: the tokens are never told; the time is known."""
    simulator.set_faults([{"kind": "hold", "next": 2}])
    clock = ManualClock()
    async with line(simulator.url, clock=clock, max_connections=1) as made:
        asked = [asyncio.create_task(made.ask(f"r{number}-a1")) for number in range(2)]
        await until(lambda: len(made.upstream.attempts) == 2 and simulator.stats()["in_flight"] == 1)
        clock.advance(4.0)
        for task in reversed(asked):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert made.upstream.wasted_s == 4.0
        assert count(made.upstream.latency.snapshot()) == 0
