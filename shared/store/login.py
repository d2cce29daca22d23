"""From an address to a connection that is logged in, on a server that answers."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import hiredis

from shared.store.base import StoreRefused, StoreUnavailable
from shared.store.connection import Connection
from shared.store.replies import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.store.url import RedisAddress

_RUN_ID: Final = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_MASTER: Final = b"master"


async def dial(address: RedisAddress, name: str, on_push: Callable[[Any], None] | None = None) -> Connection:
    """A connection ready for commands. Raises `StoreError` and `OSError`."""
    connection = await connect(address, on_push)
    try:
        await _log_in(connection, address, name)
    except BaseException:
        connection.cut("login failed")
        raise
    return connection


async def connect(address: RedisAddress, on_push: Callable[[Any], None] | None = None) -> Connection:
    """A connection that nobody has logged in on yet. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    connection = Connection(on_push)
    if address.path is not None:
        await loop.create_unix_connection(lambda: connection, address.path)
    else:
        context = address.ssl_context()
        await loop.create_connection(lambda: connection, address.host or "localhost", address.port, ssl=context)
    return connection


async def authenticate(connection: Connection, address: RedisAddress) -> None:
    """Raises `StoreRefused` for a wrong password."""
    if address.password is not None:
        user = (address.username,) if address.username else ()
        await ask(connection, address, "AUTH", *user, address.password)


async def ask(connection: Connection, address: RedisAddress, *arguments: str) -> Any:
    """One step of a login. Raises `StoreError`."""
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


async def _log_in(connection: Connection, address: RedisAddress, name: str) -> None:
    await authenticate(connection, address)
    if address.db:
        await ask(connection, address, "SELECT", str(address.db))
    # Asks for something in any case: a server without room says so only now.
    await ask(connection, address, "CLIENT", "SETNAME", name)
    # Refused while the server loads its data: until then it is not there, and no lease may be held against anyone.
    await ask(connection, address, "PING")
    told = _RUN_ID.search(await ask(connection, address, "INFO", "server"))
    connection.run_id = told[1] if told is not None else b""
    if address.must_be_master and (await ask(connection, address, "ROLE"))[0] != _MASTER:
        raise StoreUnavailable(f"Redis at {address.shown} is not the master any more", maybe_done=False)
