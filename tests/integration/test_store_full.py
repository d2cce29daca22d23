"""A server whose memory is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.core.errors import StoreFull
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.contract import SessionState, Settled
from tests.integration.store_calls import CLAIM, KEY, OWNER, TTL_S, make_store
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from tests.contract.conftest import Heard


async def test_a_full_server_refuses_new_samples_and_still_starts_clocks(heard: Heard) -> None:
    """C5: nothing is evicted, and commands that free memory still work."""
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
    with pytest.raises(StoreFull):
        await store.touch_session("new", 1, needs_room=True)
    with pytest.raises(StoreFull):
        await store.enter_session("key", "new")
    with pytest.raises(StoreFull):
        await store.reserve_clone("session", 1)
    assert (await store.session_infos(["new"]))[0].state is SessionState.UNKNOWN
    assert (await store.touch_session("living", 1)).seen_ms == 1, "a heartbeat is taken"
    assert await store.mark_retrieved([KEY], ttl_s=300) == 1
    assert await store.renew_lease(OWNER, ttl_s=30) is False
    await store.send_control(OWNER, b"cancel")
    assert await store.take_inbox(OWNER) == [b"cancel"]
    for number, state in enumerate((State.FAILED, State.CANCELLED, State.STALE, State.ORPHANED)):
        # An ending without a result is taken, so that a waiting client learns of it.
        lost = SampleKey("session", 10_000 + number)
        assert await store.settle(lost, CLAIM, state, b"", ttl_s=TTL_S, now_ms=0) is Settled.RESTORED
    assert await store.reap(OWNER, ttl_s=TTL_S, now_ms=0) == [pending]
    await store.close()
    server.stop()


async def test_a_result_larger_than_the_servers_memory_is_refused_and_the_limit_told(heard: Heard) -> None:
    """C5: the caller learns that the result will never fit, and the failure is taken at once.

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
