"""The master of the moment, as sentinels tell it.

Asked before each connection, so nothing is cached that a failover could make wrong. What a sentinel says may be stale
for a moment: the server's own ROLE has the last word (`login.py`), and a master that turns out to take no writes is
left (`Link.found_replica`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shared.store.base import StoreRefused, StoreUnavailable
from shared.store.login import ask, authenticate, connect

if TYPE_CHECKING:
    from shared.store.url import RedisAddress, SentinelAddress

# A sentinel answers in a millisecond; one whose host is gone must leave time to ask the others.
_ASK_TIMEOUT_S: Final = 1.0


class Sentinels:
    """A `link.Place` that moves."""

    def __init__(self, address: SentinelAddress) -> None:
        self._address = address
        # The one that answered last stands first.
        self._order = list(address.sentinels)

    @property
    def shown(self) -> str:
        return self._address.shown

    async def locate(self) -> RedisAddress:
        """Raises `StoreRefused` when a sentinel does not know the service, or the password is wrong."""
        troubles = []
        for sentinel in tuple(self._order):
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    host, port = await self._ask(sentinel)
            except (OSError, TimeoutError, StoreUnavailable) as error:
                troubles.append(f"{sentinel.host}:{sentinel.port}: {error or 'no answer'}")
                self._put(sentinel, len(self._order))
                continue
            self._put(sentinel, 0)
            return replace(self._address.server, host=host, port=port, must_be_master=True)
        raise StoreUnavailable(f"no sentinel of {self.shown} answers ({'; '.join(troubles)})", maybe_done=False)

    def _put(self, sentinel: RedisAddress, place: int) -> None:
        # Three links ask side by side.
        self._order.remove(sentinel)
        self._order.insert(place, sentinel)

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
