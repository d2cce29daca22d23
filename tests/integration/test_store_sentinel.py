"""The store with sentinels: a failover during work, and wrong answers of sentinels."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from shared.core.errors import StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.store.contract import Settled
from shared.store.one_server import RedisStore
from tests.contract.conftest import Heard
from tests.integration.store_calls import CLAIM, OWNER, TTL_S, in_the_end
from tests.redis_sentinels import RedisSentinels
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sentinels() -> Iterator[RedisSentinels]:
    made = RedisSentinels()
    yield made
    made.stop()


@pytest.fixture
async def store(sentinels: RedisSentinels, heard: Heard) -> AsyncIterator[RedisStore]:
    made = RedisStore(sentinels.url, rng=Random(1))
    await made.open(heard, OWNER)
    yield made
    await made.close()


async def test_the_master_is_found_and_the_mode_is_told(sentinels: RedisSentinels, store: RedisStore) -> None:
    sentinels.master.command("SET", "gw:s:odd:7", "not a record")
    with pytest.raises(StoreRefused, match="not a sample record"):
        await store.read(SampleKey("odd", 7))
    assert (await store.info()).mode == "sentinel"
    assert "hunter2" not in repr(RedisStore(sentinels.url.replace("://", "://:hunter2@")))


async def test_a_service_that_no_sentinel_knows_is_refused(sentinels: RedisSentinels) -> None:
    store = RedisStore(sentinels.url.replace("/results", "/nothing"))
    with pytest.raises(StoreRefused, match="knows no service 'nothing'"):
        await store.open(Heard(), OWNER)
    await store.close()


async def test_no_sentinel_at_all_is_one_clear_sentence() -> None:
    store = RedisStore("redis+sentinel://127.0.0.1:1,127.0.0.1:2/x")
    with pytest.raises(StoreUnavailable, match=r"no sentinel of redis\+sentinel://127.0.0.1:1,127.0.0.1:2/x answers"):
        await store.open(Heard(), OWNER)
    await store.close()


async def test_sentinels_and_server_have_logins_of_their_own() -> None:
    server = RedisServer("--requirepass", "s@rver", tcp=True)
    sentinel = RedisServer(tcp=True, sentinel=True)
    assert sentinel.command("SENTINEL", "MONITOR", "results", "127.0.0.1", str(server.port), "1") == b"+OK\r\n"
    assert sentinel.command("ACL", "SETUSER", "default", "resetpass", ">sen%tinel") == b"+OK\r\n"
    url = f"redis+sentinel://:s%40rver@127.0.0.1:{sentinel.port}/results"
    store = RedisStore(f"{url}?sentinel_password=sen%25tinel")
    await store.open(Heard(), OWNER)
    await store.info()
    await store.close()
    for wrong in (url, f"{url}?sentinel_password=x", f"{url.replace('s%40rver', 'x')}?sentinel_password=sen%25tinel"):
        store = RedisStore(wrong)
        with pytest.raises(StoreRefused, match="refuses the login"):
            await store.open(Heard(), OWNER)
        await store.close()
    sentinel.stop()
    server.stop()


async def test_all_lines_lead_to_one_server(store: RedisStore, heard: Heard) -> None:
    """A subscription that stayed on the old master would hear nothing."""
    commands, push = store._link.connection, store._push_link.connection
    assert commands is not None and push is not None
    push.run_id = b"another server's"
    commands.cut("by the test")
    await in_the_end(store.info)
    assert push.lost.done()
    await heard.until(lambda heard: heard.gaps == 1)


async def test_a_demoted_master_is_left(sentinels: RedisSentinels, store: RedisStore) -> None:
    """It answers but refuses writes: a connection that stays would refuse every sample."""
    connection = store._link.connection
    assert connection is not None
    master, replica = sentinels.master, sentinels.replica()
    master.command("REPLICAOF", "127.0.0.1", str(replica.port))
    try:
        with pytest.raises(StoreUnavailable):
            await store.begin(SampleKey("demoted", 1), CLAIM)
        assert connection.lost.done()
    finally:
        master.command("REPLICAOF", "NO", "ONE")
    assert await in_the_end(lambda: store.begin(SampleKey("demoted", 2), CLAIM)) is None


async def test_a_failover_is_survived_and_counts_as_a_restart(
    sentinels: RedisSentinels, store: RedisStore, heard: Heard
) -> None:
    """C3: pending samples settle on the new master, watchers hear messages again, and workers refill."""
    keys = [SampleKey("session", number) for number in range(50)]
    await asyncio.gather(*(in_the_end(lambda key=key: store.begin(key, CLAIM)) for key in keys))  # type: ignore[misc]
    await store.watch("session")
    restarted_s = store.restarted_s
    assert restarted_s is None
    gaps_before = heard.gaps
    old = sentinels.master
    sentinels.stop_sentinel(2)
    old.kill()
    outcomes = await asyncio.gather(
        *(
            in_the_end(lambda key=key: store.settle(key, CLAIM, State.READY, b"late", ttl_s=TTL_S, now_ms=0))  # type: ignore[misc]
            for key in keys
        )
    )
    assert set(outcomes) <= {Settled.WRITTEN, Settled.REPEATED, Settled.RESTORED}
    sentinels.wait_for_new_master(old)
    assert store.restarted_s is not None
    await heard.until(lambda heard: heard.gaps > gaps_before)
    await in_the_end(lambda: store.watch("session"))
    store.announce("session", 3)
    await heard.until(lambda heard: ("session", 3) in heard.announced)
    record = await store.read(keys[0])
    assert record is not None and bytes(record.payload) == b"late"
