"""Waves of new connections on a socket that others will serve later."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from shared.http.server import Acceptor
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Greeter(asyncio.Protocol):
    made = 0
    told = 0

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's, always
        type(self).made += 1
        assert self.descriptor in (None, transport.get_extra_info("socket").fileno())
        type(self).told += self.descriptor is not None
        transport.write(b"hello")
        transport.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as made:
        yield made


def connect(listener: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(count)]


async def greeted(client: socket.socket) -> bytes:
    client.setblocking(False)
    with client:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.get_running_loop().sock_recv(client, 10)


async def test_a_wave_is_taken_in_a_few_turns(listener: socket.socket) -> None:
    """One by one it would take as many turns as there are connections."""
    Greeter.made = Greeter.told = 0
    clients = connect(listener, 300)
    acceptor = Acceptor(listener, Greeter, 1024, None)
    await acceptor.start()
    turns = 0
    while Greeter.made < 300:
        await asyncio.sleep(0)
        turns += 1
    assert turns < 100
    # Each turn's first is the loop's own.
    assert Greeter.told >= 290
    assert set(await asyncio.gather(*map(greeted, clients))) == {b"hello"}
    await acceptor.close()


async def test_who_comes_after_the_stop_waits_for_the_next(listener: socket.socket) -> None:
    """B15"""
    first = Acceptor(listener, Greeter, 1024, None)
    await first.start()
    assert await greeted(connect(listener, 1)[0]) == b"hello"
    first.stop()
    Greeter.made = 0
    clients = connect(listener, 50)
    assert Greeter.made == 0
    second = Acceptor(listener, Greeter, 1024, None)
    await second.start()
    await until(lambda: Greeter.made == 50)
    assert set(await asyncio.gather(*map(greeted, clients))) == {b"hello"}
    await first.close()
    await second.close()


async def test_a_client_that_has_gone_again_is_nobodys_trouble(listener: socket.socket) -> None:
    for client in connect(listener, 50):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    acceptor = Acceptor(listener, Greeter, 1024, None)
    await acceptor.start()
    assert await greeted(connect(listener, 1)[0]) == b"hello"
    await acceptor.close()


@pytest.mark.parametrize("which", [1, 3, 5], ids=["the first of those waiting", "the next", "the loop's own"])
async def test_a_connection_that_cannot_be_taken_is_told_and_ends_alone(listener: socket.socket, which: int) -> None:
    made = 0

    def failing_once(descriptor: int | None) -> asyncio.Protocol:
        nonlocal made
        made += 1
        if made == which:
            raise MemoryError
        return Greeter(descriptor)

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    clients = connect(listener, 5)
    acceptor = Acceptor(listener, failing_once, 1024, None)
    await acceptor.start()
    assert sorted(await asyncio.gather(*map(greeted, clients))) == [b"", *[b"hello"] * 4]
    assert await greeted(connect(listener, 1)[0]) == b"hello"
    assert [type(context["exception"]) for context in reported] == [MemoryError]
    await acceptor.close()
