"""Upstream connections over real sockets: whose address they leave from, which ports they take, how many there are."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from shared.clock import SystemClock
from shared.config import Settings
from shared.core import ports
from shared.core.upstream_protocol import ClientChoice, UpstreamProtocol
from tests.waiting import until
from workers.upstream.connector import (
    BoundSocketFactory,
    connection_limits,
    make_client,
    make_probe_session,
    make_session,
)
from workers.upstream.forwarder import Forwarder
from workers.upstream.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.connector import AddrInfoType

ASKED = {"model": "sim/tiny", "prompt": [10], "max_tokens": 1}
# linux/in.h, since 6.3: the ephemeral ports of one socket.
IP_LOCAL_PORT_RANGE = 51
FEW_PORTS = (42_000, 42_063)
_PACKED = struct.pack("=HH", *FEW_PORTS)


class FewPorts(BoundSocketFactory):
    """As on a machine with 64 ephemeral ports."""

    def __call__(self, address: AddrInfoType) -> socket.socket:
        made = super().__call__(address)
        made.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, _PACKED)
        return made


def kernel_limits_ports() -> bool:
    with socket.socket() as tried:
        try:
            tried.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, _PACKED)
        except OSError:
            return False
    return True


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def simulator_on(stack: AsyncExitStack, host: str = "127.0.0.1") -> Simulator:
    return await stack.enter_async_context(Simulator(SimulatorConfig(host=host)))


Ask = Callable[[str], Awaitable[int]]
Way = Callable[..., Awaitable[Ask]]


class Ways:
    """The ways out for load: both clients of samples, and the session of what is passed through."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def own(self, source_ip: str | None, **settings: Any) -> Ask:
        return await self._client(source_ip, Settings(upstream_client=ClientChoice.OWN, **settings))

    async def aiohttp(self, source_ip: str | None, **settings: Any) -> Ask:
        return await self._client(source_ip, Settings(upstream_client=ClientChoice.AIOHTTP, **settings))

    async def _client(self, source_ip: str | None, chosen: Settings) -> Ask:
        client = make_client(chosen, source_ip)
        self._stack.push_async_callback(client.close)
        questions = await self._stack.enter_async_context(make_probe_session(chosen, source_ip))
        forwarder = Forwarder(client, questions, SystemClock(), chosen.upstream_api_key)

        async def ask(url: str) -> int:
            upstream = Upstream(url)
            reply = await forwarder.post(
                upstream, upstream.samples_urls[UpstreamProtocol.COMPLETIONS], json.dumps(ASKED).encode(), {}
            )
            return 200 if isinstance(reply, bytes) else 500

        return ask

    async def session(self, source_ip: str | None, **settings: Any) -> Ask:
        session = await self._stack.enter_async_context(make_session(Settings(**settings), source_ip))
        return partial(complete, session)


@pytest.fixture(params=["own", "aiohttp", "session"])
def way(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Way:
    """Make one of the three: `await way(source_ip, **settings)` is a coroutine function that asks an upstream's URL."""
    made: Way = getattr(Ways(stack), request.param)
    return made


async def complete(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(f"{url}/v1/completions", json=ASKED) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("source_ip", ["127.0.0.7", "127.1.2.3"])
async def test_connections_leave_from_the_slots_address(stack: AsyncExitStack, way: Way, source_ip: str) -> None:
    simulator = await simulator_on(stack)
    ask = await way(source_ip)
    assert await ask(simulator.url) == 200
    assert simulator.stats()["by_source_ip"] == {source_ip: 1}


async def test_a_question_leaves_from_it_too_and_over_a_new_connection_each_time(stack: AsyncExitStack) -> None:
    simulator = await simulator_on(stack)
    session = await stack.enter_async_context(make_probe_session(Settings(), "127.0.0.7"))
    for _ in range(2):
        assert await complete(session, simulator.url) == 200
        await until(lambda: simulator.stats()["connections"] == 0)
    assert simulator.stats()["by_source_ip"] == {"127.0.0.7": 2}


async def test_without_an_address_the_kernel_chooses(stack: AsyncExitStack, way: Way) -> None:
    simulator = await simulator_on(stack)
    ask = await way(None)
    assert await ask(simulator.url) == 200


def test_the_port_is_left_to_connect() -> None:
    """B5: bound early, it would be spent for all destinations."""
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))
    with BoundSocketFactory("127.0.0.7")(address) as made:
        assert made.getsockname() == ("127.0.0.7", 0)
        assert not made.getblocking()


def test_an_address_that_is_not_ours_leaves_no_descriptor_behind() -> None:
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="assign") as caught:
        BoundSocketFactory("192.0.2.1")(address)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not kernel_limits_ports(), reason="the kernel does not know IP_LOCAL_PORT_RANGE (6.3)")
async def test_ports_are_spent_per_destination_and_what_is_beyond_them_queues(
    stack: AsyncExitStack, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5: 64 ports, 200 samples, two upstreams."""
    monkeypatch.setattr("workers.upstream.connector._ephemeral_range", lambda: FEW_PORTS)
    monkeypatch.setattr("workers.upstream.connector.BoundSocketFactory", FewPorts)
    simulators = [await simulator_on(stack, host) for host in ("127.0.0.1", "127.0.0.2")]
    for simulator in simulators:
        simulator.set_faults([{"kind": "hold"}])
    limit = ports.connection_limit(FEW_PORTS, len(simulators))
    ask = await way("127.0.0.9", upstreams=tuple(simulator.url for simulator in simulators))
    asked: list[asyncio.Future[int]] = [asyncio.ensure_future(ask(simulators[number % 2].url)) for number in range(200)]
    await until(lambda: sum(simulator.stats()["in_flight"] for simulator in simulators) == limit)
    assert limit > FEW_PORTS[1] - FEW_PORTS[0] + 1
    for simulator in simulators:
        simulator.set_faults([])
        # Over a connection of its own: those of the session are all in use.
        async with aiohttp.request("POST", f"{simulator.url}/_sim/release") as response:
            assert response.status == 200
    assert set(await asyncio.gather(*asked)) == {200}


@pytest.mark.skipif(not kernel_limits_ports(), reason="the kernel does not know IP_LOCAL_PORT_RANGE (6.3)")
async def test_one_upstream_that_gets_all_the_samples_has_ports_for_its_share(
    stack: AsyncExitStack, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5: the other one rests; what one address cannot open waits as well."""
    monkeypatch.setattr("workers.upstream.connector._ephemeral_range", lambda: FEW_PORTS)
    monkeypatch.setattr("workers.upstream.connector.BoundSocketFactory", FewPorts)
    simulator = await simulator_on(stack)
    ask = await way("127.0.0.9", upstreams=(simulator.url, "http://127.0.0.2:1"))
    assert set(await asyncio.gather(*(ask(simulator.url) for _ in range(200)))) == {200}


async def test_no_more_connections_than_the_limit(stack: AsyncExitStack, way: Way) -> None:
    simulator = await simulator_on(stack)
    ask = await way(None, max_connections=3)
    assert await asyncio.gather(*(ask(simulator.url) for _ in range(20))) == [200] * 20
    assert simulator.stats()["connections"] <= 3


async def test_idle_connections_are_closed_before_the_upstream_closes_them(stack: AsyncExitStack, way: Way) -> None:
    """B4"""
    simulator = await simulator_on(stack)
    ask = await way(None, upstream_keep_alive_s=0.1)
    assert await ask(simulator.url) == 200
    assert simulator.stats()["connections"] == 1
    await until(lambda: simulator.stats()["connections"] == 0)


async def test_nothing_is_sent_that_was_not_asked_for(
    stack: AsyncExitStack, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy from the environment, no User-Agent; the upstream's key and nothing of the client's."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend((await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", 0))
    ask = await way(None, upstream_api_key="sk-1")
    for _ in range(2):
        assert await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") == 200
    names = {line.partition(":")[0] for line in seen if ":" in line}
    assert names - {"content-type"} == {"host", "authorization", "content-length"}
    assert "authorization: bearer sk-1" in seen


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"workers": 1}, 1),
        ({"workers": 4}, 4),
        ({"workers": 4, "source_ips": ("127.0.0.2", "127.0.0.3")}, 2),
        ({"workers": 2, "source_ips": ("127.0.0.2", "127.0.0.3", "127.0.0.4")}, 1),
    ],
)
def test_workers_that_share_an_address_share_its_ports(
    settings: dict[str, Any], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.upstream.connector.resource.getrlimit", lambda _: (10**9, 10**9))
    monkeypatch.setattr("workers.upstream.connector._ephemeral_range", lambda: (10_000, 19_999))
    upstreams = ("http://a", "http://b")
    assert connection_limits(Settings(upstreams=upstreams, **settings)) == (18000 // share, 9000 // share)


def test_a_limit_that_was_given_counts() -> None:
    assert connection_limits(Settings(max_connections=5)) == (5, 0)
    assert connection_limits(Settings(max_connections=0)) == (0, 0)
