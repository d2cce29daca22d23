"""Log in to a server, and find the current master through sentinels.

Sentinels are asked before each connection, so nothing is cached that a failover could make wrong. Their answer may be
stale for a moment: the server's own ROLE decides, and a master that turns out to take no writes is left
(`Link.found_replica`).
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import hiredis

from shared.core.errors import StoreRefused, StoreUnavailable
from shared.redis.connection import RedisConnection, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.redis.address import RedisAddress, SentinelAddress


_RUN_ID: Final = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_MASTER: Final = b"master"


async def dial(address: RedisAddress, name: str, on_push: Callable[[Any], None] | None = None) -> RedisConnection:
    """Return a connection that is ready for commands. Raises `StoreError` and `OSError`."""
    connection = await connect(address, on_push)
    try:
        await _log_in(connection, address, name)
    except BaseException:
        connection.cut("login failed")
        raise
    return connection


async def connect(address: RedisAddress, on_push: Callable[[Any], None] | None = None) -> RedisConnection:
    """Return a connection without a login. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    connection = RedisConnection(on_push)
    if address.path is not None:
        await loop.create_unix_connection(lambda: connection, address.path)
    else:
        context = address.ssl_context()
        await loop.create_connection(lambda: connection, address.host or "localhost", address.port, ssl=context)
    return connection


async def authenticate(connection: RedisConnection, address: RedisAddress) -> None:
    """Send the password, if there is one. Raises `StoreRefused` if it is wrong."""
    if address.password is not None:
        user = (address.username,) if address.username else ()
        await ask(connection, address, "AUTH", *user, address.password)


async def ask(connection: RedisConnection, address: RedisAddress, *arguments: str) -> Any:
    """Take one step of a login and return the reply. Raises `StoreError`."""
    try:
        reply = await connection.ask(*arguments)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"Redis at {address.shown}: {error}", maybe_done=False) from None
    if isinstance(reply, hiredis.ReplyError):
        refused = error_of(reply)
        if isinstance(refused, StoreRefused):
            raise StoreRefused(f"Redis at {address.shown} refuses the login: {reply}")
        raise refused
    return reply


async def _log_in(connection: RedisConnection, address: RedisAddress, name: str) -> None:
    await authenticate(connection, address)
    if address.db:
        await ask(connection, address, "SELECT", str(address.db))
    # This also shows whether the server has room for another client: it says so only at the first command.
    await ask(connection, address, "CLIENT", "SETNAME", name)
    # Refused while the server loads its data. Until then it counts as down, so that no lease is seen as lapsed.
    await ask(connection, address, "PING")
    run_id = _RUN_ID.search(await ask(connection, address, "INFO", "server"))
    connection.run_id = run_id[1] if run_id is not None else b""
    if address.must_be_master and (await ask(connection, address, "ROLE"))[0] != _MASTER:
        raise StoreUnavailable(f"Redis at {address.shown} is no longer the master", maybe_done=False)


# A sentinel answers in a millisecond; one whose host is down must leave time to ask the others.
_ASK_TIMEOUT_S: Final = 1.0


class Sentinels:
    """A `link.Server` whose address may change: sentinels name the current master."""

    def __init__(self, address: SentinelAddress) -> None:
        self._address = address
        # The one that answered last comes first.
        self._order = list(address.sentinels)

    @property
    def shown(self) -> str:
        return self._address.shown

    async def locate(self) -> RedisAddress:
        """Return the master's address.

        Raises `StoreRefused` if a sentinel does not know the service or the password is wrong, and `StoreUnavailable`
        if no sentinel answers.
        """
        troubles = []
        for sentinel in tuple(self._order):
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    host, port = await self._ask(sentinel)
            except (OSError, TimeoutError, StoreUnavailable) as error:
                troubles.append(f"{sentinel.host}:{sentinel.port}: {error or 'no answer'}")
                self._move(sentinel, len(self._order))
                continue
            self._move(sentinel, 0)
            return replace(self._address.server, host=host, port=port, must_be_master=True)
        raise StoreUnavailable(f"no sentinel of {self.shown} answers ({'; '.join(troubles)})", maybe_done=False)

    def _move(self, sentinel: RedisAddress, index: int) -> None:
        # By value: three links ask at the same time, and each may have moved it.
        self._order.remove(sentinel)
        self._order.insert(index, sentinel)

    async def _ask(self, sentinel: RedisAddress) -> tuple[str, int]:
        connection = await connect(sentinel)
        try:
            await authenticate(connection, sentinel)
            service = self._address.service
            found = await ask(connection, sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        finally:
            connection.cut("the sentinel was asked")
        if found is None:
            known = f"the sentinel {sentinel.host}:{sentinel.port} knows no service {service!r}"
            raise StoreRefused(f"{known}; the URL is redis+sentinel://HOST:PORT/SERVICE")
        host, port = found
        return host.decode(), int(port)
