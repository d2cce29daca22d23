"""The multiplexed connection to a real server, through a proxy that can cut and stall it."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from typing import TYPE_CHECKING

import pytest

from shared.core.errors import ConfigError, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.redis.address import RedisAddress
from shared.redis.commands import Commands
from shared.store.contract import Settled
from tests.contract.conftest import Heard
from tests.cut_proxy import CutProxy
from tests.integration.store_calls import CLAIM, KEY, OWNER, TTL_S, in_the_end, make_store
from tests.redis_server import RedisServer, running_redis
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from shared.store.one_server import RedisStore


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as made:
        yield made


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[CutProxy]:
    server.command("FLUSHALL")
    async with CutProxy(server.url.removeprefix("unix://")) as made:
        yield made


@pytest.fixture
async def store(proxy: CutProxy, heard: Heard) -> AsyncIterator[RedisStore]:
    made = make_store(proxy.url)
    await made.open(heard, OWNER)
    yield made
    await made.close()


async def test_a_worker_has_three_connections_however_many_callers(proxy: CutProxy, store: RedisStore) -> None:
    """A12, C2: 5,000 callers at once."""
    await asyncio.gather(*(store.read(SampleKey("session", number)) for number in range(5000)))
    assert proxy.accepted == 3


async def test_five_hundred_polls_take_no_connection_of_their_own(proxy: CutProxy, store: RedisStore) -> None:
    """A12: each waits for another sampling session."""
    names = [f"session-{number}" for number in range(500)]
    await asyncio.gather(*(store.watch(name) for name in names))
    await asyncio.gather(*(store.read(SampleKey(name, 1)) for name in names))
    assert proxy.accepted == 3
    for name in names:
        store.unwatch(name)


async def test_vanishing_callers_never_cross_replies(store: RedisStore) -> None:
    """C1: 10,000 reads of distinct values, half of them cancelled at a random moment."""
    seed = 20_261_129
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    keys = [SampleKey("session", number) for number in range(200)]
    for key in keys:
        payload = f"value of {key.seq_id}".encode()
        await store.settle(key, CLAIM, State.READY, payload, ttl_s=TTL_S, now_ms=0)

    async def read(key: SampleKey) -> None:
        record = await store.read(key)
        assert record is not None
        assert bytes(record.payload) == f"value of {key.seq_id}".encode()

    for _ in range(50):
        tasks = [asyncio.create_task(read(rng.choice(keys))) for _ in range(200)]
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        given_up = rng.sample(tasks, 100)
        for task in given_up:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        others = [result for result in results if not isinstance(result, asyncio.CancelledError)]
        assert others == [None] * len(others)


async def test_a_cut_fails_everything_that_waits_and_then_heals(proxy: CutProxy, store: RedisStore) -> None:
    proxy.stall()
    waiting = [asyncio.create_task(store.read(KEY)) for _ in range(100)]
    await asyncio.sleep(0)
    proxy.cut()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) and result.maybe_done for result in results)
    await in_the_end(store.info)
    assert await store.read(KEY) is None


async def test_what_was_never_sent_is_told_apart(proxy: CutProxy, store: RedisStore) -> None:
    """A begin that was not sent needs no follow-up; one whose reply was lost does."""
    proxy.refusing = True
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await store.info()
    with pytest.raises(StoreUnavailable) as caught:
        await store.begin(KEY, CLAIM)
    assert not caught.value.maybe_done
    assert store.connected_since_s is None
    proxy.refusing = False
    await in_the_end(store.info)


async def test_a_lost_reply_may_be_repeated(proxy: CutProxy, store: RedisStore) -> None:
    """The command was executed and its reply lost: begin and settle are safe to repeat."""
    # The server knows both scripts, so the lost reply is that of the command and not NOSCRIPT.
    await store.settle(SampleKey("session", 2), CLAIM, State.READY, b"", ttl_s=TTL_S, now_ms=0)
    await store.begin(SampleKey("session", 2), CLAIM)
    proxy.stall()
    begun = asyncio.create_task(store.begin(KEY, CLAIM))
    await until_executed(store, proxy, "begin", begun)
    assert await store.begin(KEY, CLAIM) is not None
    proxy.stall()
    settled = asyncio.create_task(store.settle(KEY, CLAIM, State.READY, b"x", ttl_s=TTL_S, now_ms=0))
    await until_executed(store, proxy, "settle", settled)
    assert await store.settle(KEY, CLAIM, State.READY, b"x", ttl_s=TTL_S, now_ms=0) is Settled.REPEATED


async def until_executed(store: RedisStore, proxy: CutProxy, what: str, task: asyncio.Task[object]) -> None:
    """Cut the connection when a second store sees that the server has executed the command."""
    target = proxy._target
    second = make_store(f"unix://{target}")
    await second.open(Heard(), "second-000000000")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            header = await second.read_header(KEY)
            if header is not None and (what == "begin" or header.state is State.READY):
                break
    await second.close()
    proxy.cut()
    with pytest.raises(StoreUnavailable) as caught:
        await task
    assert caught.value.maybe_done
    await in_the_end(store.info)


async def test_a_silent_server_is_given_up_at_the_deadline(proxy: CutProxy) -> None:
    store = make_store(proxy.url, deadline_s=0.05)
    await store.open(Heard(), OWNER)
    proxy.stall()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await store.info()
    proxy.flow()
    await in_the_end(store.info)
    await store.close()


async def test_too_much_that_waits_is_refused_at_once(proxy: CutProxy, store: RedisStore) -> None:
    """A stalled server does not make a worker grow without bound."""
    assert isinstance(store._commands, Commands)
    store._commands._max_queued_bytes = 100_000
    tasks = [
        asyncio.create_task(store.settle(key, CLAIM, State.READY, b"x" * 50_000, ttl_s=1, now_ms=0))
        for key in (SampleKey("session", number) for number in range(10))
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, StoreUnavailable)]
    assert refused
    assert not any(error.maybe_done for error in refused)


async def test_scripts_are_taught_again(server: RedisServer, store: RedisStore) -> None:
    assert await store.begin(KEY, CLAIM) is None
    server.command("SCRIPT", "FLUSH")
    assert await store.settle(KEY, CLAIM, State.READY, b"x", ttl_s=TTL_S, now_ms=0) is Settled.WRITTEN


async def test_lost_subscriptions_come_back_and_say_so(server: RedisServer, heard: Heard, store: RedisStore) -> None:
    """C4"""
    await store.watch("session")
    server.command("CLIENT", "KILL", "TYPE", "pubsub")
    await heard.until(lambda heard: heard.gaps == 1)
    store.announce("session", 5)
    await heard.until(lambda heard: heard.announced == [("session", 5)])
    await store.broadcast(b"all")
    await heard.until(lambda heard: heard.controls == [b"all"])


async def test_a_silent_line_of_subscriptions_is_noticed(proxy: CutProxy, heard: Heard) -> None:
    """C4: nothing is pending on it, so a dead one looks like a quiet one; watchers must not wait for ever."""
    store = make_store(proxy.url, deadline_s=0.05)
    await store.open(heard, OWNER)
    proxy.stall()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await store.watch("session")
    proxy.flow()
    await heard.until(lambda heard: heard.gaps)
    await store.close()


async def test_a_quiet_line_of_subscriptions_is_left_alone(proxy: CutProxy, heard: Heard) -> None:
    """A server that answers the probe counts as up, whatever the deadline."""
    store = make_store(proxy.url, deadline_s=0.001)
    await store.open(heard, OWNER)
    connection = store._push_link.connection
    assert connection is not None
    for _ in range(3):
        connection.probe()
        await until(lambda: connection._probed_s is None)
    assert store._push_link.connection is connection
    assert heard.gaps == 0
    await store.close()


async def test_an_announcement_into_a_lost_line_is_dropped_quietly(store: RedisStore) -> None:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    connection = store._link.connection
    assert connection is not None
    connection.cut("by the test")
    sent_before = store.commands
    store.announce("session", 1)
    await in_the_end(store.info)
    gc.collect()
    assert complaints == []
    assert store.commands > sent_before


async def test_a_link_outlives_a_tls_file_that_is_being_replaced(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def unreadable(_: RedisAddress) -> None:
        asked.set()
        raise ConfigError("a TLS file cannot be used")

    with monkeypatch.context() as patch:
        patch.setattr(RedisAddress, "ssl_context", unreadable)
        connection = store._link.connection
        assert connection is not None
        connection.cut("by the test")
        await asked.wait()
        with pytest.raises(StoreUnavailable):
            await store.info()
    await in_the_end(store.info)
