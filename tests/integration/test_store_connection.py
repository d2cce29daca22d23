"""The multiplexed connection on a real server, with a line that can be cut and stalled."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from random import Random
from typing import TYPE_CHECKING

import hiredis
import pytest

from shared.clock import SystemClock
from shared.core.errors import ConfigError
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.base import Settled, StoreFull, StoreRefused, StoreUnavailable
from shared.store.lines import CommandLine
from shared.store.link import Link
from shared.store.redis import RedisStore
from shared.store.url import RedisAddress, parse_url
from tests.contract.conftest import Heard
from tests.cut_proxy import CutProxy
from tests.integration.store_calls import CLAIM, OWNER, TTL_S, in_the_end
from tests.redis_server import RedisServer, running_redis
from tests.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

KEY = SampleKey("session", 1)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as made:
        yield made


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[CutProxy]:
    server.command("FLUSHALL")
    async with CutProxy(server.url.removeprefix("unix://")) as made:
        yield made


def make_store(url: str, deadline_s: float = 10.0) -> RedisStore:
    return RedisStore(url, rng=Random(1), deadline_s=deadline_s)


@pytest.fixture
async def store(proxy: CutProxy, heard: Heard) -> AsyncIterator[RedisStore]:
    made = make_store(proxy.url)
    await made.open(heard, OWNER)
    yield made
    await made.close()


class FakeServer:
    """Answers each command with a fixed reply, for what a real server says too rarely."""

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


async def test_a_worker_has_three_connections_however_many_callers(proxy: CutProxy, store: RedisStore) -> None:
    """A12, C2: 5,000 callers at once."""
    await asyncio.gather(*(store.read(SampleKey("session", number)) for number in range(5000)))
    assert proxy.accepted == 3


async def test_five_hundred_polls_take_no_connection_of_their_own(proxy: CutProxy, store: RedisStore) -> None:
    """A12: each waits for a sampling session of its own."""
    names = [f"session-{number}" for number in range(500)]
    await asyncio.gather(*(store.watch(name) for name in names))
    await asyncio.gather(*(store.read(SampleKey(name, 1)) for name in names))
    assert proxy.accepted == 3
    for name in names:
        store.unwatch(name)


async def test_vanishing_callers_never_cross_replies(store: RedisStore) -> None:
    """C1: 10,000 reads of distinct values, half of them given up at a random moment."""
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
    await in_the_end(store.ping)
    assert await store.read(KEY) is None


async def test_what_was_never_sent_is_told_apart(proxy: CutProxy, store: RedisStore) -> None:
    """A begin that was not sent needs no looking after; one whose reply was lost does."""
    proxy.refusing = True
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await store.ping()
    with pytest.raises(StoreUnavailable) as caught:
        await store.begin(KEY, CLAIM)
    assert not caught.value.maybe_done
    assert store.connected_since_s is None
    proxy.refusing = False
    await in_the_end(store.ping)


async def test_a_lost_reply_may_be_repeated(proxy: CutProxy, store: RedisStore) -> None:
    """The command was executed, its reply lost: begin and settle are safe to repeat."""
    # Both scripts are known to the server: the lost reply is that of the command, not the request to teach it.
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
    """Cut the line when the server has done it: a second store sees that."""
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
    await in_the_end(store.ping)


async def test_a_silent_server_is_given_up_at_the_deadline(proxy: CutProxy) -> None:
    store = make_store(proxy.url, deadline_s=0.05)
    await store.open(Heard(), OWNER)
    proxy.stall()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await store.ping()
    proxy.flow()
    await in_the_end(store.ping)
    await store.close()


async def test_too_much_that_waits_is_refused_at_once(proxy: CutProxy, store: RedisStore) -> None:
    """Bounded memory: a stalled server does not make a worker grow without end."""
    assert isinstance(store._line, CommandLine)
    store._line._max_queued_bytes = 100_000
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


async def test_a_server_that_comes_back_with_an_older_state_hides_no_completion_behind_an_old_cursor(
    heard: Heard,
) -> None:
    """C3: what is logged after the crash takes the places of what was lost in it."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await logged(store, 1, 2)
    server.command("SAVE")
    await logged(store, 3)
    cursor = (await store.read_log("session", 0, 0, limit=10)).cursor
    server.restart(keep_data=True, save=False)
    await heard.until(lambda heard: heard.gaps)
    await in_the_end(store.ping)
    await logged(store, 4, 5)
    page = await store.read_log("session", 0, cursor, limit=10)
    assert [entry.seq_id for entry in page.entries] == [1, 2, 4, 5]
    assert (await store.read_log("session", 0, page.cursor, limit=10)).entries == []
    await store.close()
    server.stop()


async def test_a_server_that_comes_back_with_its_data_has_been_answered_by_nobody(heard: Heard) -> None:
    """C7: what was entered after it was saved is lost, and each worker has to tell it again."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    before = await store.server_run()
    assert await store.answer_roll(OWNER, before)
    server.restart(keep_data=True)
    await in_the_end(store.ping)
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
    """C3: without its data, without restarting anything of ours."""
    server = RedisServer()
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await store.begin(KEY, CLAIM)
    await store.watch("session")
    assert store.restarted_s is None
    server.command("CLIENT", "KILL", "TYPE", "normal")
    await in_the_end(store.ping)
    assert not saw_a_restart(store), "a mere cut is no restart"
    server.restart()
    await in_the_end(store.ping)
    assert saw_a_restart(store)
    assert await store.read(KEY) is None
    assert await store.begin(KEY, CLAIM) is None
    await heard.until(lambda heard: heard.gaps >= 1)
    await store.close()
    server.stop()


async def test_a_full_server_refuses_new_samples_and_still_starts_clocks(heard: Heard) -> None:
    """C5: nothing is evicted; what frees memory goes on working."""
    server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await store.begin(KEY, CLAIM)
    await store.settle(KEY, CLAIM, State.READY, b"first", ttl_s=TTL_S, now_ms=0)
    pending = SampleKey("session", 2)
    await store.begin(pending, CLAIM)
    for size_bytes in (500_000, 10_000, 100):
        with pytest.raises(StoreFull):
            for number in range(100, 2000):
                key = SampleKey(f"fill-{size_bytes}", number)
                await store.settle(key, CLAIM, State.READY, b"x" * size_bytes, ttl_s=1e6, now_ms=0)
    with pytest.raises(StoreFull):
        for number in range(100, 2000):
            await store.begin(SampleKey("session", number), Claim("other-0000000000", 1, 1, bytes(16)))
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    assert await store.renew_lease(OWNER, ttl_s=30) is False
    await store.send_control(OWNER, b"cancel")
    assert await store.take_inbox(OWNER) == [b"cancel"]
    for number, state in enumerate((State.FAILED, State.CANCELLED, State.STALE, State.ORPHANED)):
        # What is no result: a client that waits hears of it.
        lost = SampleKey("session", 10_000 + number)
        assert await store.settle(lost, CLAIM, state, b"", ttl_s=TTL_S, now_ms=0) is Settled.RESTORED
    assert await store.reap(OWNER, ttl_s=TTL_S, now_ms=0) == [pending]
    await store.close()
    server.stop()


async def test_a_result_larger_than_the_servers_memory_is_refused_and_the_limit_told(heard: Heard) -> None:
    """C5: whoever settles can tell that it will never fit, and what is said instead is taken at once.

    The server's buffer for what it refused counts against its limit a moment longer.
    """
    server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = make_store(server.url)
    await store.open(heard, OWNER)
    await store.begin(KEY, CLAIM)
    for size_bytes in (9 * 2**20, 8 * 2**20):
        with pytest.raises(StoreFull):
            await store.settle(KEY, CLAIM, State.READY, bytes(size_bytes), ttl_s=TTL_S, now_ms=0)
    assert await store.limit_bytes(KEY) == 8 * 2**20
    assert await store.settle(KEY, CLAIM, State.FAILED, b"too large", ttl_s=TTL_S, now_ms=0) is Settled.WRITTEN
    await store.close()
    server.stop()


async def test_no_room_for_clients_is_a_state_not_an_error_text(heard: Heard) -> None:
    """A16"""
    server = RedisServer("--maxclients", "3")
    store = make_store(server.url)
    await store.open(heard, OWNER)
    second = make_store(server.url)
    with pytest.raises(StoreUnavailable):
        await second.open(Heard(), "second-000000000")
    await second.close()
    await store.close()
    # The server notices a moment later that the first has left.
    await in_the_end(lambda: second.open(Heard(), "second-000000000"))
    await second.close()
    server.stop()


async def test_passwords_and_users_are_used_and_refused_in_clear_words() -> None:
    server = RedisServer("--requirepass", "s:cret/1", *"--user gateway on >pass%word ~* &* +@all".split(), tcp=True)
    host = f"127.0.0.1:{server.port}"
    for login in (":s%3Acret%2F1", "gateway:pass%25word"):
        store = make_store(f"redis://{login}@{host}/0")
        await store.open(Heard(), OWNER)
        await store.ping()
        await store.close()
    for login in (":wrong", "nobody:x"):
        store = make_store(f"redis://{login}@{host}")
        with pytest.raises(StoreRefused, match="refuses the login"):
            await store.open(Heard(), OWNER)
        await store.close()
    store = make_store(f"redis://{host}")
    with pytest.raises(StoreRefused, match="refuses the login"):
        await store.open(Heard(), OWNER)
    await store.close()
    server.stop()


async def test_databases_are_apart(server: RedisServer) -> None:
    first, second = make_store(f"{server.url}?db=1"), make_store(f"{server.url}?db=2")
    await first.open(Heard(), OWNER)
    await second.open(Heard(), "second-000000000")
    assert await first.begin(KEY, CLAIM) is None
    assert await second.begin(KEY, CLAIM) is None
    await first.close()
    await second.close()


async def test_nobody_there_is_one_clear_sentence() -> None:
    store = make_store("unix:///nowhere/redis.sock")
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await store.open(Heard(), OWNER)
    await store.close()


async def test_a_silent_line_of_subscriptions_is_noticed(proxy: CutProxy, heard: Heard) -> None:
    """C4: nothing is pending on it, so a dead one looks like a quiet one; who watches is not left hanging."""
    store = make_store(proxy.url, deadline_s=0.05)
    await store.open(heard, OWNER)
    proxy.stall()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await store.watch("session")
    proxy.flow()
    await heard.until(lambda heard: heard.gaps)
    await store.close()


async def test_a_quiet_line_of_subscriptions_is_left_alone(proxy: CutProxy, heard: Heard) -> None:
    """Whatever the deadline, a server that answers when it is asked is there."""
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
    await in_the_end(store.ping)
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
            await store.ping()
    await in_the_end(store.ping)


def is_up(link: Link) -> bool:
    return link.connected_since_s is not None


async def test_a_server_that_loads_its_data_is_not_there_yet(fake_server: FakeServer) -> None:
    """Otherwise the time of its loading would count against leases that nobody can renew."""
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
