"""HTTP/1.1 as the SDK's default transport speaks it, in a hand-written protocol that costs little CPU.

The client must not be the bottleneck of its own measurement, and it must open and close connections as the SDK does:
a *client object* carries up to 50 requests in flight and keeps at most 2 idle connections; more objects are made on
demand and kept. A library's pool would keep every connection and make the gateway look better than it is.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import httptools

from gateway.simulator.stats import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_IN_FLIGHT_PER_OBJECT: Final = 50
MAX_IDLE_PER_OBJECT: Final = 2
IDLE_S: Final = 90.0
CONNECT_TIMEOUT_S: Final = 30.0
# From linux/in.h; Python names it from 3.14 on. The kernel then chooses the port at connect, per destination.
_IP_BIND_ADDRESS_NO_PORT: Final = 24
# The shortest of the SDK's read timeouts is 5 s, so a delay of this length does not matter.
_SILENCE_LOOK_S: Final = 0.5
# TLS would add its own cost to the measurement, more on the client's side than on the gateway's.
_WITHOUT_TLS: Final = (
    "give the gateway's address behind the TLS proxy, or unwrap TLS on this machine: "
    "socat TCP-LISTEN:8080,fork,reuseaddr,bind=127.0.0.1 OPENSSL:HOST:443, and --url http://127.0.0.1:8080"
)


class NoReply(Exception):
    """The connection failed, or the time ran out, before a whole reply had arrived."""


@dataclass(frozen=True, slots=True)
class GatewayReply:
    status: int
    content_type: str
    body: bytes = field(repr=False)
    has_length: bool = True


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The gateway's address, and the local address to connect from (None: any)."""

    host: str
    port: int
    path: str = ""
    source_ip: str | None = None

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str, source_ip: str | None = None) -> GatewayAddress:
    """Parse `http://host[:port][/prefix]`. Raises `ValueError` for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        hint = f"; {_WITHOUT_TLS}" if parts.scheme == "https" else ""
        raise ValueError(f"{url!r} is not allowed; give http://HOST:PORT, since the load client speaks no TLS{hint}")
    return GatewayAddress(parts.hostname, parts.port or 80, parts.path.rstrip("/"), source_ip)


class SilenceWatch:
    """End exchanges that read nothing for too long. One timer serves all of them, since one each is expensive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: set[ClientConnection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ClientConnection) -> None:
        self._waiting.add(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(_SILENCE_LOOK_S, self._look)

    def discard(self, connection: ClientConnection) -> None:
        self._waiting.discard(connection)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        for connection in [connection for connection in self._waiting if connection.silent_after_s <= now_s]:
            connection.fall_silent()
        self._timer = self._loop.call_later(_SILENCE_LOOK_S, self._look) if self._waiting else None


class ClientConnection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, traffic: Traffic, silence: SilenceWatch) -> None:
        self._traffic = traffic
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[GatewayReply] | None = None
        self._last_read_s = 0.0
        self._read_timeout_s = 0.0
        self.idle_since_s = 0.0
        self.usable = False
        self._start_message()

    def exchange(self, request: bytes, read_timeout_s: float) -> asyncio.Future[GatewayReply]:
        """Write one request. The future ends with the reply or with `NoReply`."""
        waiter = self._waiter = self._loop.create_future()
        if not self.usable or self._transport is None:
            self._fail("the connection is closed")
            return waiter
        self._read_timeout_s = read_timeout_s
        self._last_read_s = self._loop.time()
        self._silence.add(self)
        self._traffic.sent_bytes += len(request)
        self._transport.write(request)
        return waiter

    def abort(self) -> None:
        """Drop the connection at once, as a killed client does."""
        self.usable = False
        self._fail("dropped by the client")
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail("reset" if exc is not None else "closed by the gateway")

    def data_received(self, data: bytes) -> None:
        self._last_read_s = self._loop.time()
        self._traffic.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.usable = False
            self._fail(f"not HTTP: {error}")
            self.close()

    # -- callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lowered == b"content-length":
            self._has_length = value.strip() != b"0"

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        reply = GatewayReply(self._parser.get_status_code(), self._content_type, body, self._has_length)
        self.usable = self._parser.should_keep_alive()
        self._start_message()
        waiter = self._release()
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _start_message(self) -> None:
        self._content_type = ""
        self._has_length = False
        self._body: list[bytes] = []

    @property
    def silent_after_s(self) -> float:
        return self._last_read_s + self._read_timeout_s

    def fall_silent(self) -> None:
        self._fail(f"nothing read for {self._read_timeout_s:g} s")
        self.abort()

    def _release(self) -> asyncio.Future[GatewayReply] | None:
        self._silence.discard(self)
        waiter, self._waiter = self._waiter, None
        return waiter

    def _fail(self, reason: str) -> None:
        waiter = self._release()
        if waiter is not None and not waiter.done():
            waiter.set_exception(NoReply(reason))


async def connect(target: GatewayAddress, make: Callable[[], ClientConnection]) -> ClientConnection:
    """Open a connection. Raises `NoReply` if that fails."""
    try:
        if target.source_ip is not None:
            return await _connect_from(target.source_ip, target, make)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(make, target.host, target.port)
            return connection
    except OSError as error:  # TimeoutError is one of them
        raise NoReply(f"cannot connect to {target.authority}: {error or 'no answer'}") from error


async def _connect_from(
    source_ip: str, target: GatewayAddress, make: Callable[[], ClientConnection]
) -> ClientConnection:
    loop, address = asyncio.get_running_loop(), (target.host, target.port)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((source_ip, 0))
        # On loopback the kernel connects at once, unless the listener's queue is full.
        if sock.connect_ex(address):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, address)
        _, connection = await loop.create_connection(make, sock=sock)
    except BaseException:
        sock.close()
        raise
    return connection


@dataclass(slots=True, eq=False)
class ClientObject:
    """The connections of one httpx client of the SDK."""

    in_flight: int = 0
    idle: deque[ClientConnection] = field(default_factory=deque)

    def take_idle(self, now_s: float) -> ClientConnection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable and now_s - connection.idle_since_s < IDLE_S:
                return connection
            connection.close()
        return None

    def put_back(self, connection: ClientConnection, now_s: float) -> None:
        if not connection.usable or len(self.idle) >= MAX_IDLE_PER_OBJECT:
            connection.close()
            return
        connection.idle_since_s = now_s
        self.idle.append(connection)


class ConnectionPool:
    """The client objects of one kind of request; the SDK separates session, submit, retrieve and session poll."""

    def __init__(self, target: GatewayAddress, traffic: Traffic | None = None) -> None:
        self._target = target
        self.traffic = traffic or Traffic()
        self._silence = SilenceWatch()
        self._make = partial(ClientConnection, self.traffic, self._silence)
        self._loop = asyncio.get_running_loop()
        self._not_full: list[ClientObject] = []
        self._all: list[ClientObject] = []
        self.connections_opened = 0
        self.requests_sent = 0

    async def send(self, request: bytes, read_timeout_s: float) -> GatewayReply:
        """Exchange one request for its reply. Raises `NoReply`. If cancelled, drop the connection mid-exchange."""
        owner = self._claim()
        try:
            connection = owner.take_idle(self._loop.time()) or await self._open()
            self.requests_sent += 1
            try:
                reply = await connection.exchange(request, read_timeout_s)
            except BaseException:
                connection.abort()
                raise
            owner.put_back(connection, self._loop.time())
            return reply
        finally:
            if owner.in_flight == MAX_IN_FLIGHT_PER_OBJECT:
                self._not_full.append(owner)
            owner.in_flight -= 1

    async def send_and_drop(self, request: bytes) -> None:
        """Write one request on a new connection and close it at once, so that the reply is lost. Raises `NoReply`."""
        connection = await self._open()
        self.requests_sent += 1
        lost = connection.exchange(request, CONNECT_TIMEOUT_S)
        connection.close()
        await asyncio.wait([lost])
        lost.exception()

    def close(self) -> None:
        self._silence.close()
        for owner in self._all:
            while owner.idle:
                owner.idle.pop().close()

    async def _open(self) -> ClientConnection:
        self.connections_opened += 1
        return await connect(self._target, self._make)

    def _claim(self) -> ClientObject:
        if not self._not_full:
            added = ClientObject()
            self._not_full.append(added)
            self._all.append(added)
        owner = self._not_full[-1]
        owner.in_flight += 1
        if owner.in_flight == MAX_IN_FLIGHT_PER_OBJECT:
            self._not_full.pop()
        return owner
