"""A server that restarts with its data, with some of it, with none, and while it still loads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import hiredis
import pytest

from shared.clock import SystemClock
from shared.core.errors import StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.redis.address import RedisAddress, parse_url
from shared.redis.link import Link
from tests.integration.store_calls import CLAIM, KEY, OWNER, TTL_S, in_the_end, make_store
from tests.redis_server import RedisServer
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.store.one_server import RedisStore
    from tests.contract.conftest import Heard


class FakeServer:
    """Answer each command with a fixed reply, for replies that a real server gives too rarely."""

    def __init__(self) -> None:
        self.url = ""
        self.serving = 0
        self.replies = {"CLIENT": b"+OK\r\n", "INFO": b"$10\r\nrun_id:abc\r\n", "PING": b"+PONG\r\n"}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving += 1
        try:
            await self._answer(reader, writer)
            await writer.wait_closed()
        except ConnectionError:
            pass
        finally:
            self.serving -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while words := commands.gets():
                writer.write(self.replies[words[0].decode()])
        writer.close()


@pytest.fixture
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    async with await asyncio.start_server(fake.serve, "127.0.0.1", 0) as listening:
        fake.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield fake
        await until(lambda: fake.serving == 0)


def saw_a_restart(store: RedisStore) -> bool:
    return store.restarted_s is not None


async def test_a_server_that_comes_back_with_an_older_state_hides_no_completion_behind_an_old_cursor(
    heard: Heard,
) -> None:
    """C3: entries logged after the crash take the numbers of those that were lost in it."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await logged(store, 1, 2)
    server.command("SAVE")
    await logged(store, 3)
    cursor = (await store.read_log("session", 0, 0, limit=10)).cursor
    server.restart(keep_data=True, save=False)
    await heard.until(lambda heard: heard.gaps)
    await in_the_end(store.info)
    await logged(store, 4, 5)
    page = await store.read_log("session", 0, cursor, limit=10)
    assert [entry.seq_id for entry in page.entries] == [1, 2, 4, 5]
    assert (await store.read_log("session", 0, page.cursor, limit=10)).entries == []
    await store.close()
    server.stop()


async def test_a_server_that_comes_back_with_its_data_has_been_answered_by_nobody(heard: Heard) -> None:
    """C7: entries after the last save are lost, and each worker has to enter them again."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    before = await store.server_run()
    assert await store.answer_roll(OWNER, before)
    server.restart(keep_data=True)
    await in_the_end(store.info)
    assert not (await store.read_roll()).answered
    assert not await store.answer_roll(OWNER, before)
    assert await store.answer_roll(OWNER, await store.server_run())
    assert (await store.read_roll()).answered == {OWNER}
    await store.close()
    server.stop()


async def logged(store: RedisStore, *seq_ids: int) -> None:
    for seq_id in seq_ids:
        await store.settle(SampleKey("session", seq_id), CLAIM, State.READY, b"x", ttl_s=TTL_S, now_ms=0)


async def test_a_restarted_server_is_found_again(heard: Heard) -> None:
    """C3: it lost its data, and none of our processes restarts."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await store.begin(KEY, CLAIM)
    await store.watch("session")
    assert store.restarted_s is None
    server.command("CLIENT", "KILL", "TYPE", "normal")
    await in_the_end(store.info)
    assert not saw_a_restart(store), "a mere cut is no restart"
    server.restart()
    await in_the_end(store.info)
    assert saw_a_restart(store)
    assert await store.read(KEY) is None
    assert await store.begin(KEY, CLAIM) is None
    await heard.until(lambda heard: heard.gaps >= 1)
    await store.close()
    server.stop()


def is_up(link: Link) -> bool:
    return link.connected_since_s is not None


async def test_a_server_that_loads_its_data_is_not_there_yet(fake_server: FakeServer) -> None:
    """Otherwise the loading time would count against leases, which cannot be renewed meanwhile."""
    address = parse_url(fake_server.url)
    assert isinstance(address, RedisAddress)
    link = Link(address, "test", clock=SystemClock(), rng_unit=lambda: 0.0)
    fake_server.replies["PING"] = b"-LOADING Redis is loading the dataset in memory\r\n"
    with pytest.raises(StoreUnavailable, match="LOADING"):
        await link.open()
    assert not is_up(link)
    fake_server.replies["PING"] = b"+PONG\r\n"
    await link.open()
    assert is_up(link)
    await link.close()
