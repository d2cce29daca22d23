"""Open connections: resolve the name, try one address after the other, add TLS where the URL says so."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
import time
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shared.core.faults import BreakKind
from shared.loop.turns import TurnLimit
from workers.upstream.client.port import Broken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.connector import AddrInfoType

    from workers.upstream.client.connection import UpstreamConnection
    from workers.upstream.client.port import Origin

    SocketFactory = Callable[[AddrInfoType], socket.socket]
    Resolve = Callable[[str, int], Awaitable[list[AddrInfoType]]]

# A router that moved is found within half a minute. The aiohttp sessions keep names as long.
_NAMES_KEPT_S: Final = 30.0

# Each takes about 0.1 ms. Thousands in one turn, when a wave of samples is submitted, would hold the loop for seconds.
_DIALS_PER_TURN: Final = 16
# Linux searches every second port of its range first. With more than half of the ports in use towards one upstream it
# tries thousands: a `connect` then takes 0.5 to 1 ms of CPU instead of 0.03 (docs/upstream.md).
_SLOW_CONNECT_S: Final = 0.0003

# The usual results of `connect` on a non-blocking socket.
_UNDER_WAY: Final = frozenset({errno.EINPROGRESS, errno.EINTR})


class Names:
    """Resolve names: one query for all who wait, kept for a while, addresses taken in turn."""

    def __init__(self, resolve: Resolve, now_s: Callable[[], float]) -> None:
        self._resolve = resolve
        self._now_s = now_s
        self._known: dict[tuple[str, int], tuple[float, deque[AddrInfoType]]] = {}
        self._asking: dict[tuple[str, int], asyncio.Future[list[AddrInfoType]]] = {}

    async def addresses(self, host: str, port: int) -> list[AddrInfoType]:
        """Return the addresses of a name, the one to try first in front. Raises `OSError` for an unknown name."""
        name = (host, port)
        until_s, known = self._known.get(name, (0.0, deque()))
        if self._now_s() >= until_s:
            known = deque(await self._ask(name))
            self._known[name] = (self._now_s() + _NAMES_KEPT_S, known)
        # Spread connections over the addresses of a service.
        known.rotate(-1)
        return list(known)

    async def _ask(self, name: tuple[str, int]) -> list[AddrInfoType]:
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.ensure_future(self._resolve(*name))
            asking.add_done_callback(lambda _: self._asking.pop(name))
        return await asyncio.shield(asking)


class Dialler:
    """Opens connections, each within `timeout_s` for name, addresses and TLS together."""

    def __init__(
        self,
        make_socket: SocketFactory,
        family: socket.AddressFamily,
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext],
        resolve: Resolve | None = None,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Dial addresses of `family`, and call `tls` for each https connection.

        `resolve` replaces the system's name service, `cpu_s` this thread's CPU clock.
        """
        self._make_socket = make_socket
        self._family = family
        self._timeout_s = timeout_s
        self._tls = tls
        self._turns = TurnLimit(_DIALS_PER_TURN)
        self._cpu_s = cpu_s
        self._loop = asyncio.get_running_loop()
        self._names = Names(resolve or self._ask_the_system, self._loop.time)

    async def dial(
        self, origin: Origin, made: Callable[[], UpstreamConnection], key_digest: bytes = b""
    ) -> UpstreamConnection:
        """Open a connection whose protocol `made` makes. Raises `Broken`. `key_digest` is as in `FairQueue`."""
        # Waiting for a turn is not waiting for the upstream: the deadline starts after it.
        await self._turns.wait(key_digest)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._first_of(await self._addresses(origin), origin, made)
        except TimeoutError as error:
            raise Broken(BreakKind.CONNECT_TIMEOUT, str(error), error.errno) from None

    async def _addresses(self, origin: Origin) -> list[AddrInfoType]:
        literal = _literal(origin.host, origin.port)
        if literal is not None:
            return [literal]
        try:
            return await self._names.addresses(origin.host, origin.port)
        except (OSError, UnicodeError) as error:
            # UnicodeError: the name cannot be put to a name service at all.
            raise Broken(BreakKind.DNS, str(error), getattr(error, "errno", None)) from None

    async def _first_of(
        self, addresses: list[AddrInfoType], origin: Origin, made: Callable[[], UpstreamConnection]
    ) -> UpstreamConnection:
        errors: list[OSError] = []
        for address in addresses:
            try:
                return await self._connect(address, origin, made)
            except ssl.SSLError as error:
                raise Broken(BreakKind.TLS, str(error)) from None
            except TimeoutError:
                raise
            except OSError as error:
                # Its traceback holds this frame, which holds the list: a reference cycle.
                errors.append(error.with_traceback(None))
        # The errno counts only if all addresses failed with the same one.
        numbers = {error.errno for error in errors}
        number = numbers.pop() if len(numbers) == 1 else None
        raise Broken(BreakKind.CONNECT_REFUSED, "; ".join(map(str, errors)), number)

    async def _connect(
        self, address: AddrInfoType, origin: Origin, made: Callable[[], UpstreamConnection]
    ) -> UpstreamConnection:
        opened = self._make_socket(address)
        try:
            await self._reach(opened, address[4])
            _, connection = await self._loop.create_connection(
                made,
                sock=opened,
                ssl=self._tls() if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            opened.close()
            raise
        connection.socket = opened
        return connection

    async def _reach(self, opened: socket.socket, where: tuple[str, int] | tuple[str, int, int, int]) -> None:
        """Connect the socket. Raises `OSError`.

        The loop's `sock_connect` would resolve the address once more, a third of the cost of a dial.
        """
        started_s = self._cpu_s()
        number = opened.connect_ex(where)
        self._turns.per_turn = 1 if self._cpu_s() - started_s >= _SLOW_CONNECT_S else _DIALS_PER_TURN
        if number in _UNDER_WAY:
            ended = self._loop.create_future()
            self._loop.add_writer(opened, _wake, ended)
            try:
                await ended
            finally:
                self._loop.remove_writer(opened)
            number = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, f"Connect call failed {where}")

    async def _ask_the_system(self, host: str, port: int) -> list[AddrInfoType]:
        found = await self._loop.getaddrinfo(host, port, family=self._family, type=socket.SOCK_STREAM)
        return list(found)


# Upstreams are few, and each is dialled for every sample of a wave.
@lru_cache(maxsize=256)
def _literal(host: str, port: int) -> AddrInfoType | None:
    """Return the address if `host` is one, and None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.version == 4:
        return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)
    return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0)


def _wake(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
