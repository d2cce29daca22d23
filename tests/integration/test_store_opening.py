"""Opening a store on a server without room, with a login, with another database, or that is down."""

from __future__ import annotations

import pytest

from shared.core.errors import StoreRefused, StoreUnavailable
from tests.contract.conftest import Heard
from tests.integration.store_calls import CLAIM, KEY, OWNER, in_the_end, make_store
from tests.redis_server import RedisServer, running_redis


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
        await store.info()
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


async def test_databases_are_apart() -> None:
    with running_redis() as server:
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
