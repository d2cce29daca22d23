"""When commands leave: at once if everything is answered, otherwise together and soon."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.core.errors import StoreUnavailable
from shared.redis import connection as module
from shared.redis.connection import RedisConnection
from tests.waiting import until


class Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def get_write_buffer_size(self) -> int:
        return 0

    def names(self) -> list[str]:
        """Return the commands of each write, one letter each."""
        return ["".join(word for word in data.decode().split("\r\n") if word.isupper()) for data in self.writes]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no command leaves because of the time limit."""
    monkeypatch.setattr(module, "_HELD_AT_MOST_S", 3600.0)


@pytest.fixture
async def transport() -> Transport:
    return Transport()


@pytest.fixture
async def connection(transport: Transport) -> RedisConnection:
    made = RedisConnection()
    made.connection_made(transport)  # type: ignore[arg-type] # as much of one as is used
    return made


async def turn() -> None:
    await asyncio.sleep(0)


async def test_what_is_asked_in_one_turn_leaves_together(connection: RedisConnection, transport: Transport) -> None:
    connection.ask("A")
    connection.ask("B")
    assert transport.names() == []
    await turn()
    assert transport.names() == ["AB"]


async def test_what_comes_before_the_answer_leaves_with_it(connection: RedisConnection, transport: Transport) -> None:
    connection.ask("A")
    connection.ask("B")
    await turn()
    for name in "CDE":
        connection.ask(name)
        await turn()
    connection.data_received(b"+1\r\n")
    await turn()
    assert transport.names() == ["AB"], "half an answer is none"
    connection.data_received(b"+2\r\n")
    await turn()
    assert transport.names() == ["AB", "CDE"]


async def test_who_is_answered_asks_on_in_the_same_write(connection: RedisConnection, transport: Transport) -> None:
    async def asker() -> None:
        await connection.ask("A")
        await connection.ask("Z")

    task = asyncio.create_task(asker())
    for _ in range(3):
        await turn()
    connection.ask("B")
    connection.data_received(b"+1\r\n")
    for _ in range(3):
        await turn()
    assert transport.names() == ["A", "BZ"]
    connection.data_received(b"+2\r\n+3\r\n")
    await task


async def test_an_answer_that_takes_long_holds_nothing_up(
    connection: RedisConnection, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELD_AT_MOST_S", 0.001)
    connection.ask("A")
    await turn()
    asked = connection.ask("B")
    await until(lambda: transport.names() == ["A", "B"])
    connection.data_received(b"+1\r\n+2\r\n")
    assert await asked == b"2"
    connection.ask("C")
    await turn()
    assert transport.names() == ["A", "B", "C"]


async def test_what_is_held_fails_with_the_connection(connection: RedisConnection, transport: Transport) -> None:
    connection.ask("A")
    await turn()
    held: asyncio.Future[Any] = connection.ask("B")
    connection.cut("a test")
    with pytest.raises(StoreUnavailable):
        await held
    await turn()
    assert transport.names() == ["A"]


async def test_pushes_answer_nothing(transport: Transport) -> None:
    pushed: list[Any] = []
    connection = RedisConnection(pushed.append)
    connection.connection_made(transport)  # type: ignore[arg-type] # as above
    connection.send("SUBSCRIBE", "x")
    await turn()
    connection.send("PING")
    await turn()
    assert transport.names() == ["SUBSCRIBE", "PING"]
    connection.data_received(b"+PONG\r\n")
    assert pushed == [b"PONG"]
